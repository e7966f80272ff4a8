// XXH3-128 of buffers longer than 240 bytes, as hex: what names a chunk. After the algorithm's public specification.

const SECRET = Buffer.from(
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" +
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e",
  "hex",
);
const [P32_1, P32_2, P32_3] = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const [P64_1, P64_2, P64_3] = [0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n];
const [P64_4, P64_5] = [0x85ebca77c2b2ae63n, 0x27d4eb2f165667c5n];
const U64 = (1n << 64n) - 1n;

/** Name of a chunk: 32 hexadecimal digits. */
export function xxh3(data) {
  if (data.length <= 240) throw new Error("shorter inputs have other rules, which are not needed here");
  const acc = [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1];
  const stripe = (at, key) => {
    for (let i = 0; i < 8; i++) {
      const value = data.readBigUInt64LE(at + 8 * i);
      const mixed = value ^ SECRET.readBigUInt64LE(key + 8 * i);
      acc[i ^ 1] = (acc[i ^ 1] + value) & U64;
      acc[i] = (acc[i] + (mixed & 0xffffffffn) * (mixed >> 32n)) & U64;
    }
  };
  const numStripes = Math.floor((data.length - 1) / 64);
  for (let n = 0; n < numStripes; n++) {
    stripe(64 * n, 8 * (n % 16));
    if (n % 16 === 15) {
      for (let i = 0; i < 8; i++) {
        const mixed = acc[i] ^ (acc[i] >> 47n) ^ SECRET.readBigUInt64LE(128 + 8 * i);
        acc[i] = (mixed * P32_1) & U64;
      }
    }
  }
  stripe(data.length - 64, 121);
  const merged = (key, start) => {
    let sum = start & U64;
    for (let i = 0; i < 4; i++) {
      const left = acc[2 * i] ^ SECRET.readBigUInt64LE(key + 16 * i);
      const product = left * (acc[2 * i + 1] ^ SECRET.readBigUInt64LE(key + 16 * i + 8));
      sum = (sum + ((product & U64) ^ (product >> 64n))) & U64;
    }
    sum = ((sum ^ (sum >> 37n)) * 0x165667919e3779f9n) & U64;
    return sum ^ (sum >> 32n);
  };
  const length = BigInt(data.length);
  const high = merged(117, U64 ^ ((length * P64_2) & U64));
  return high.toString(16).padStart(16, "0") + merged(11, length * P64_1).toString(16).padStart(16, "0");
}
