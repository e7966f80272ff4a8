// Fetches a version: chunks from the first source that has them right, tensors from the joined chunks.

import { readFile } from "node:fs/promises";
import { Qwen3 } from "./qwen3.mjs";
import { xxh3 } from "./xxh3.mjs";

/** The model and vocabulary of a full manifest. Throws if a chunk is nowhere whole, or the format is not known. */
export async function fetchVersion(manifest, authorization) {
  const chunk = (part) => fetchChunk(manifest.sources, part, authorization);
  const file = async (name) => JSON.parse(await chunk(manifest.files.find((info) => info.name === name).chunk));
  const bytes = Buffer.concat(await Promise.all(manifest.chunks.map(chunk)));
  const tensors = {};
  for (const { name, offset, num_bytes: size, dtype } of manifest.tensors) {
    if (dtype !== "float32") throw new Error(`${name} is ${dtype}; float32 is all that is known here`);
    tensors[name] = new Float32Array(Uint8Array.prototype.slice.call(bytes, offset, offset + size).buffer);
  }
  const { vocab } = (await file("tokenizer.json")).model;
  return { model: new Qwen3(await file("config.json"), tensors), vocab };
}

async function fetchChunk(sources, [hash, size], authorization) {
  for (const { kind, url } of sources) {
    const where = kind === "http" ? `${url}/v1/chunks/${hash}` : `${url}/${hash}`;
    try {
      const data = kind === "http" ? await download(where, authorization) : await readFile(where.replace("file://", ""));
      if (data.length === size && xxh3(data) === hash) return data;
      console.error(`${where}: ${data.length} bytes that are not those of the chunk`);
    } catch (error) {
      console.error(`${where}: ${error}`);
    }
  }
  throw new Error(`no source has chunk ${hash}`);
}

async function download(where, authorization) {
  const reply = await fetch(where, { headers: { Authorization: authorization } });
  return Buffer.from(await reply.arrayBuffer());
}
