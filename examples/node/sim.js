'use strict';
// The sim engine over plain Buffers: real bytes, no model. The rule is written down in
// pd_grpc/engine/sim.py; each token follows from every byte of KV stored before it.

const crypto = require('node:crypto');

const CHAIN_BYTES = 16;
const EOS = 2, FIRST_BYTE = 3, FIRST_WORD = 259; // token ids
const FULL = 1, K = 1, V = 2; // KvGroupKind, PlaneKind
const STOP = 1, LENGTH = 2; // FinishReason

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0x82f63b78 : byte >>> 1;
  return byte;
});

/** CRC-32C of bytes, going on from that of the bytes before them. */
function crc32c(bytes, before = 0) {
  let crc = ~before;
  for (let i = 0; i < bytes.length; i++) crc = CRC_TABLE[(crc ^ bytes[i]) & 0xff] ^ (crc >>> 8);
  return ~crc >>> 0;
}

const sha256 = (bytes) => crypto.createHash('sha256').update(bytes).digest();

/** SHA-256 over token ids as little-endian uint32. */
const promptDigest = (tokens) => sha256(le32(tokens));

function shake128(bytes, outputLength) {
  return crypto.createHash('shake128', { outputLength }).update(bytes).digest();
}

function le32(values) {
  const bytes = Buffer.alloc(4 * values.length);
  values.forEach((value, i) => bytes.writeUInt32LE(value, 4 * i));
  return bytes;
}

function le64(value) {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(BigInt(value));
  return bytes;
}

function f32(value) {
  const bytes = Buffer.alloc(4);
  bytes.writeFloatLE(value);
  return bytes;
}

/** A pool of blocks in the canonical order, and the rule that fills and reads them.
 *
 * A sequence's `blocks` are the numbers of its blocks in logical order.
 */
class SimModel {
  constructor({ vocab, layers, heads, headDim, blockSize, numBlocks }) {
    Object.assign(this, { vocab, layers, headDim, blockSize });
    this.rows = layers * 2 * heads; // of a block: layer -> plane -> head
    this.layerBytes = 2 * heads * headDim * blockSize;
    const planes = [K, V].map((kind) => ({ kind, dtype: 'uint8', heads, head_dim: headDim }));
    this.layout = {
      model: `sim-v1/vocab=${vocab}`, positions: 'sim', block_size: blockSize, format: 'canonical',
      groups: [{ kind: FULL, layers, window: 0, planes }],
    };
    this.pool = Array.from({ length: numBlocks }, () => Buffer.alloc(layers * this.layerBytes));
  }

  blocksFor(tokens) {
    return Math.ceil(tokens / this.blockSize);
  }

  /** Write the payload of one layer of one block, as it came. */
  writeLayer(block, layer, payload) {
    payload.copy(this.pool[block], layer * this.layerBytes);
  }

  /** Write the KV of a token; its chain goes on from the KV that is stored before it. */
  store(blocks, position, token) {
    const before = position ? this.stored(blocks, position - 1) : Buffer.alloc(CHAIN_BYTES);
    const chain = sha256(Buffer.concat([before, le32([token])])).subarray(0, CHAIN_BYTES);
    const rest = this.rows * this.headDim - CHAIN_BYTES;
    const kv = Buffer.concat([chain, shake128(chain, rest)]);
    this.tokenRows(blocks, position).forEach((row, i) => kv.copy(row, 0, i * this.headDim));
  }

  /** The chain at a position: the first bytes of its KV. */
  stored(blocks, position) {
    return Buffer.concat(this.tokenRows(blocks, position)).subarray(0, CHAIN_BYTES);
  }

  /** The token after `tokens` tokens, from their stored KV; `generated` of them are output. */
  next(blocks, tokens, sampling, generated) {
    const parts = [le32([this.checksum(blocks, tokens)]), le64(tokens)];
    if (sampling.temperature !== 0 && sampling.top_k !== 1) {
      const { seed, temperature, top_p: topP, top_k: topK } = sampling;
      parts.push(le64(seed), f32(temperature), f32(topP), le64(topK));
    }
    const barred = generated < sampling.min_tokens ? [EOS, ...sampling.stop_token_ids] : [];
    let digest = Buffer.concat(parts), token;
    do {
      digest = sha256(digest);
      token = Number(digest.readBigUInt64LE() % BigInt(this.vocab));
    } while (barred.includes(token));
    return token;
  }

  checksum(blocks, tokens) {
    const full = Math.floor(tokens / this.blockSize), rest = tokens % this.blockSize;
    const whole = blocks.slice(0, full).map((block) => this.pool[block]);
    const rows = rest ? this.rowsOf(this.pool[blocks[full]], 0, rest) : [];
    return [...whole, ...rows].reduce((before, bytes) => crc32c(bytes, before), 0);
  }

  tokenRows(blocks, position) {
    const block = this.pool[blocks[Math.floor(position / this.blockSize)]];
    return this.rowsOf(block, position % this.blockSize, 1);
  }

  /** The bytes of each row that a block has for its tokens [slot, slot + count). */
  rowsOf(block, slot, count) {
    return Array.from({ length: this.rows }, (_, row) => {
      const at = (row * this.blockSize + slot) * this.headDim;
      return block.subarray(at, at + count * this.headDim);
    });
  }
}

/** When an answer ends. Output the client has already counts, but never ends it by itself. */
class StopRule {
  constructor(sampling, generated) {
    this.sampling = sampling;
    this.generated = 0;
    this.text = '';
    this.stopped = false;
    this.decoder = new TextDecoder('utf-8', { ignoreBOM: true });
    for (const token of generated) this.push(token);
  }

  /** Count one more token of output; the FinishReason if the answer ends with it. */
  push(token) {
    const { min_tokens: least, max_tokens: most, stop_token_ids: ids } = this.sampling;
    this.generated += 1;
    this.read(token);
    const ended = (token === EOS && !this.sampling.ignore_eos) || ids.includes(token);
    if (this.generated >= least && (ended || this.stopped)) return STOP;
    return this.generated >= most ? LENGTH : undefined;
  }

  /** The sim tokenizer (bytes, and words of their own): looks for stop strings that end here. */
  read(token) {
    const { stop, min_tokens: least } = this.sampling;
    if (!stop.length || this.stopped || token < FIRST_BYTE) return;
    const bytes = token < FIRST_WORD ? Buffer.of(token - FIRST_BYTE) : Buffer.from(` w${token}`);
    const from = this.text.length;
    this.text += this.decoder.decode(bytes, { stream: true });
    const ends = (word) => this.text.indexOf(word, Math.max(0, from - word.length + 1)) >= 0;
    this.stopped = this.generated >= least && this.text.length > from && stop.some(ends);
  }
}

module.exports = { EOS, LENGTH, STOP, SimModel, StopRule, crc32c, promptDigest };
