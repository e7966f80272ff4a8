// Builds what the package needs from web/src: the page, and the style of plots.
import { copyFile, mkdir, readFile, writeFile } from "node:fs/promises";
import { build } from "esbuild";

const view = new URL("../src/astraflow/addons/view/assets/", import.meta.url).pathname;
const plot = new URL("../src/astraflow/addons/plot/astraflow.mplstyle", import.meta.url).pathname;
const inter = "node_modules/@fontsource-variable/inter";
await mkdir(view, { recursive: true });
await build({
  entryPoints: ["src/app.js", "src/app.css"],
  outdir: view,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "eof",
  charset: "utf8",
  external: ["inter.woff2"],
  loader: { ".svg": "dataurl" },
});
for (const name of ["index.html", "icon.svg"]) await copyFile(`src/${name}`, `${view}${name}`);
await copyFile(`${inter}/files/inter-latin-wght-normal.woff2`, `${view}inter.woff2`);
await copyFile(`${inter}/LICENSE`, `${view}inter.LICENSE.txt`);

// Plots are for light pages, so they have the first of each pair of colors.
const tokens = await readFile("src/tokens.css", "utf8");
const light = Object.fromEntries([...tokens.matchAll(/--([\w-]+): light-dark\(#(\w{6}),/g)].map(([, name, color]) => [name, color]));
const style = await readFile("src/plots.mplstyle", "utf8");
await writeFile(plot, style.replace(/var\(--([\w-]+)\)/g, (_, name) => light[name]));
