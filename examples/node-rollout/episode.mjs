// One episode of one turn: a prompt in words and characters, sampled tokens, and a score for what follows the last "=".

import { softmax } from "./qwen3.mjs";

/** Samples one completion of a task under one version, and scores it. */
export function episode({ task, seed, kind }, { model, vocab }, { policy, version, temperature }) {
  const texts = Object.fromEntries(Object.entries(vocab).map(([text, id]) => [id, text]));
  const long = Object.keys(vocab).filter((text) => text.length > 1 && text[0] !== "<");
  const words = new RegExp(`${long.join("|")}|[^]`, "g");
  const ids = [...task.prompt.match(words), "<assistant>"].map((text) => vocab[text] ?? vocab["<unk>"]);
  const [random, next, start, logprobs] = [dice(seed), model.sequence(), ids.length, ids.map(() => 0)];
  let logits = ids.map(next).at(-1);
  while (ids.at(-1) !== vocab["<eos>"] && ids.length < start + policy.sampling.max_tokens) {
    const odds = softmax(temperature ? logits.map((logit) => logit / temperature) : logits);
    let [rest, id] = [random(), 0];
    while (id < odds.length - 1 && (rest -= odds[id]) >= 0) id++;
    if (!temperature) id = odds.indexOf(Math.max(...odds));
    ids.push(id);
    logprobs.push(Math.min(0, Math.log(odds[id])));
    logits = next(id);
  }
  const isWhole = ids.at(-1) === vocab["<eos>"];
  const said = ids.slice(start, isWhole ? -1 : undefined).map((id) => texts[id]).join("");
  const reward = said.includes("=") && said.split("=").at(-1).trim() === task.answer.trim() ? 1 : 0;
  const base64 = (column) => Buffer.from(column.buffer).toString("base64");
  const trajectory = {
    policy: policy.name, role: policy.name, temperature, reward, finish_reason: isWhole ? "stop" : "length",
    token_ids: base64(Int32Array.from(ids)), mask: base64(Uint8Array.from(ids, (_, i) => (i >= start ? 1 : 0))),
    behavior_logprobs: base64(Float32Array.from(logprobs)), versions: [[start, ids.length - start, version]],
    turns: [{ start, end: ids.length, reward }],
  }; // prettier-ignore
  const messages = [{ role: "user", content: task.prompt }, { role: "assistant", content: said }];
  const trajectories = kind === "eval" ? [] : [trajectory];
  return { outcome: { type: "episode", trajectories, score: reward, messages }, numTokens: ids.length - start };
}

function dice(seed) {
  let state = seed % 2 ** 32 >>> 0; // mulberry32
  return () => {
    let mixed = (state = (state + 0x6d2b79f5) >>> 0);
    mixed = Math.imul(mixed ^ (mixed >>> 15), mixed | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
