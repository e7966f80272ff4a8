// A Qwen3-shaped language model in plain JavaScript: float32 weights as they travel, one token at a time.

/** One version of a model: its config.json, and its tensors as {name: Float32Array}. */
export class Qwen3 {
  constructor(config, tensors) {
    this.config = config;
    this.tensors = tensors;
    this.theta = config.rope_parameters?.rope_theta ?? config.rope_theta;
  }

  /** A new sequence: call it with each token id in turn; it answers the logits of the next one. */
  sequence() {
    const cache = Array.from({ length: this.config.num_hidden_layers }, () => ({ keys: [], values: [] }));
    return (id) => this.#next(id, cache);
  }

  #next(id, cache) {
    const { hidden_size: width, num_hidden_layers: numLayers } = this.config;
    const embeddings = this.tensors["model.embed_tokens.weight"];
    let x = embeddings.slice(id * width, (id + 1) * width);
    for (let idx = 0; idx < numLayers; idx++) {
      const part = (name) => this.tensors[`model.layers.${idx}.${name}.weight`];
      x = plus(x, this.#attention(this.#norm(x, part("input_layernorm")), part, cache[idx]));
      const h = this.#norm(x, part("post_attention_layernorm"));
      const gate = times(part("mlp.gate_proj"), h);
      const up = times(part("mlp.up_proj"), h);
      x = plus(x, times(part("mlp.down_proj"), gate.map((g, i) => (g / (1 + Math.exp(-g))) * up[i])));
    }
    const head = this.tensors["lm_head.weight"] ?? embeddings;
    return times(head, this.#norm(x, this.tensors["model.norm.weight"]));
  }

  #attention(h, part, { keys, values }) {
    const { num_attention_heads: numHeads, num_key_value_heads: numShared, head_dim: size } = this.config;
    const position = keys.length;
    const heads = (vector, count, norm) =>
      Array.from({ length: count }, (_, i) =>
        this.#rotated(this.#norm(vector.slice(i * size, (i + 1) * size), norm), position),
      );
    const queries = heads(times(part("self_attn.q_proj"), h), numHeads, part("self_attn.q_norm"));
    keys.push(heads(times(part("self_attn.k_proj"), h), numShared, part("self_attn.k_norm")));
    values.push(times(part("self_attn.v_proj"), h));
    const mixed = new Float64Array(numHeads * size);
    queries.forEach((query, head) => {
      const shared = Math.floor((head * numShared) / numHeads);
      const weights = softmax(keys.map((key) => dot(key[shared], query) / Math.sqrt(size)));
      weights.forEach((weight, at) => {
        for (let i = 0; i < size; i++) mixed[head * size + i] += weight * values[at][shared * size + i];
      });
    });
    return times(part("self_attn.o_proj"), mixed);
  }

  #norm(x, weight) {
    const scale = 1 / Math.sqrt(dot(x, x) / x.length + this.config.rms_norm_eps);
    return Float64Array.from(x, (value, i) => value * scale * weight[i]);
  }

  #rotated(x, position) {
    const half = x.length / 2;
    return x.map((value, i) => {
      const angle = position / this.theta ** ((i % half) / half);
      const other = i < half ? -x[i + half] : x[i - half];
      return value * Math.cos(angle) + other * Math.sin(angle);
    });
  }
}

/** Probabilities of logits. */
export function softmax(logits) {
  const largest = Math.max(...logits);
  const exps = Array.from(logits, (logit) => Math.exp(logit - largest));
  const sum = exps.reduce((a, b) => a + b, 0);
  return exps.map((value) => value / sum);
}

function times(matrix, vector) {
  const numColumns = vector.length;
  const result = new Float64Array(matrix.length / numColumns);
  for (let row = 0; row < result.length; row++) {
    let sum = 0;
    for (let i = 0, at = row * numColumns; i < numColumns; i++) sum += matrix[at + i] * vector[i];
    result[row] = sum;
  }
  return result;
}

const dot = (a, b) => {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
};
const plus = (a, b) => Float64Array.from(a, (value, i) => value + b[i]);
