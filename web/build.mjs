// Builds the page into the package: one script, one style sheet, the frame and the icon.
import { copyFile, mkdir } from "node:fs/promises";
import { build } from "esbuild";

const out = new URL("../src/astraflow/addons/view/assets/", import.meta.url).pathname;
await mkdir(out, { recursive: true });
await build({
  entryPoints: ["src/app.js", "src/app.css"],
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "eof",
  charset: "utf8",
});
for (const name of ["index.html", "icon.svg"]) await copyFile(`src/${name}`, `${out}${name}`);
