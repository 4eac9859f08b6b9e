'use strict';
// What D refuses before it costs a block: malformed requests, requests too large, peers unlike it.

const { Fault, badRequest, feature, mismatch, wrong } = require('./faults');
const { LENGTH, STOP, promptDigest } = require('./sim');

const ROLE_PREFILL = 1, INLINE = 1, PULL = 2; // Role, Transport, Direction
const FULL = 1, SLIDING = 2, K = 1, V = 2, SCALE = 4; // KvGroupKind, PlaneKind
const HASH_ALGORITHM = 'sha256-128-chain';
const TRANSPORTS = ['UNSPECIFIED', 'INLINE', 'SHM', 'NIXL'];

const characters = (text) => [...text].length;
const transportName = (transport) => `TRANSPORT_${TRANSPORTS[transport] ?? transport}`;

function nameErrors(name, field, least = 0) {
  const fine = characters(name) >= least && characters(name) <= 128;
  return fine ? [] : [wrong(field, `must have ${least} to 128 characters`)];
}

function idErrors(id, field) {
  if (/^[A-Za-z0-9._:-]{1,128}$/.test(id)) return [];
  return [wrong(field, 'must be 1 to 128 characters of [A-Za-z0-9._:-]')];
}

/** SamplingParams with defaults filled in. */
function samplingOf(given) {
  const p = given ?? {};
  return {
    max_tokens: p.max_tokens ?? 0, min_tokens: p.min_tokens ?? 0, temperature: p.temperature ?? 1,
    top_p: p.top_p ?? 1, top_k: p.top_k ?? 0, seed: p.seed ?? '0', stop: p.stop ?? [],
    stop_token_ids: p.stop_token_ids ?? [], ignore_eos: p.ignore_eos ?? false,
  };
}

function samplingErrors(s) {
  const stopsFine = s.stop.length <= 16 && s.stop.every((text) => text && characters(text) <= 256);
  const minFine = s.min_tokens >= 0 && (s.max_tokens < 1 || s.min_tokens <= s.max_tokens);
  const limits = [
    ['max_tokens', s.max_tokens >= 1, 'must be at least 1'],
    ['min_tokens', minFine, 'must be between 0 and max_tokens'],
    ['temperature', s.temperature >= 0 && s.temperature <= 100, 'must be between 0 and 100'],
    ['top_p', s.top_p > 0 && s.top_p <= 1, 'must be above 0 and at most 1'],
    ['top_k', s.top_k >= 0, 'must be 0 (off) or positive'],
    ['stop', stopsFine, 'at most 16 strings, each of 1 to 256 characters'],
    ['stop_token_ids', s.stop_token_ids.length <= 64, 'at most 64 ids'],
  ];
  const missed = limits.filter(([, fine]) => !fine);
  return missed.map(([name, , limit]) => wrong(`sampling.${name}`, limit));
}

/** Reserved fields are refused by name, never ignored. */
function checkReserved(sampling, scope) {
  const s = sampling ?? {}, r = scope ?? {};
  const used = {
    'sampling.min_p': s.min_p,
    'sampling.presence_penalty': s.presence_penalty,
    'sampling.frequency_penalty': s.frequency_penalty,
    'sampling.repetition_penalty': (s.repetition_penalty ?? 1) !== 1,
    'sampling.logit_bias': Object.keys(s.logit_bias ?? {}).length,
    'sampling.n': s.n > 1,
    'sampling.prompt_logprobs': s.prompt_logprobs,
    'sampling.structured_output': s.structured_output,
    'sampling.logprobs': s.logprobs !== undefined, // a feature, which the sim model has not
    'scope.model': r.model,
    'scope.adapter': r.adapter,
    'scope.media_hashes': r.media_hashes?.length,
    'scope.tenant': r.tenant,
    'scope.priority': r.priority,
    'scope.siblings': r.siblings > 1,
    'scope.draft_token_ids': r.draft_token_ids?.length,
    'scope.direction': r.direction >= PULL,
  };
  const name = Object.keys(used).find((field) => used[field]);
  if (name) throw feature(name);
}

const saltOf = (scope) => Buffer.from(scope?.cache_salt ?? []);

function saltErrors(scope) {
  return saltOf(scope).length > 64 ? [wrong('scope.cache_salt', 'must have at most 64 bytes')] : [];
}

/** The fault when P's leg and the client's do not mean the same request; null when they do. */
function legsDiffer(allocate, client) {
  if (!allocate || !client) return null;
  const tokens = [...client.prompt, ...client.generated], { sampling } = client;
  const same = {
    prompt_tokens: allocate.prompt_tokens === tokens.length,
    prompt_digest: promptDigest(tokens).equals(allocate.prompt_digest),
    sampling: JSON.stringify(samplingOf(allocate.sampling)) === JSON.stringify(sampling),
    max_new_tokens: allocate.max_new_tokens === sampling.max_tokens - client.generated.length,
    'scope.cache_salt': saltOf(allocate.scope).equals(client.salt),
  };
  const part = Object.keys(same).find((name) => !same[name]);
  if (!part) return null;
  const text = `the prefill's and the client's request differ in ${part}`;
  return new Fault('HANDOFF_MISMATCH', text, { metadata: { part } });
}

/** The first kind of a group or plane that is not built, or not known, by its path. */
function unbuiltKind(layout) {
  for (const [g, { kind, planes }] of layout.groups.entries()) {
    if (![0, FULL, SLIDING].includes(kind)) return feature(`layout.groups[${g}].kind`);
    const p = planes.findIndex((plane) => ![K, V, SCALE].includes(plane.kind));
    if (p >= 0) return feature(`layout.groups[${g}].planes[${p}].kind`);
  }
  return null;
}

/** The first field, in reading order, in which two layouts differ, as a fault; null without. */
function difference(path, ours, theirs) {
  if (!(ours instanceof Object)) return ours === theirs ? null : mismatch(path, ours, theirs);
  const list = Array.isArray(ours);
  if (list && ours.length !== theirs.length) return mismatch(path, ours.length, theirs.length);
  for (const name of Object.keys(ours)) {
    const field = list ? `${path}[${name}]` : `${path}.${name}`;
    const found = difference(field, ours[name], theirs[name]);
    if (found) return found;
  }
  return null;
}

/** P's transports, hash algorithm and number of shards. */
function checkMeans({ hash_algorithm: hash, transports, shards }) {
  if (hash && hash !== HASH_ALGORITHM) throw mismatch('hash_algorithm', HASH_ALGORITHM, hash);
  if (transports.length && !transports.some((transport) => transport <= INLINE)) {
    throw mismatch('transports', 'TRANSPORT_INLINE', transports.map(transportName).join(', '));
  }
  if (shards.length > 1) throw mismatch('shards', 1, shards.length);
}

/** The checks of one D: `me` is its instance, `model` what it runs, `maxModelLen` in tokens. */
class Checks {
  constructor(me, model, maxModelLen) {
    Object.assign(this, { me, model, maxModelLen });
  }

  transferId(id, field) {
    const errors = idErrors(id, field);
    if (errors.length) throw badRequest(...errors);
  }

  /** A call that means another D, by name; empty is any. */
  name(meant) {
    const here = this.me.name;
    if (!meant || meant === here) return;
    const text = `this is ${here}, not ${meant}`;
    throw new Fault('WRONG_INSTANCE', text, { metadata: { meant, here } });
  }

  /** A ref's key. One of another process of this D is refused; 0 is any, where that is allowed. */
  ref(ref, field, anyEpoch = false) {
    const { transfer_id: id = '', attempt = 0, decode_epoch: meant = '0' } = ref ?? {};
    const errors = idErrors(id, `${field}.transfer_id`), here = this.me.epoch;
    if (attempt < 1) errors.push(wrong(`${field}.attempt`, 'must be at least 1'));
    if (errors.length) throw badRequest(...errors);
    if (meant !== here && !(anyEpoch && meant === '0')) {
      const text = `the transfer means another process of ${this.me.name}`;
      throw new Fault('STALE_EPOCH', text, { metadata: { meant, here } });
    }
    return `${id}#${attempt}`;
  }

  hello(hello) {
    const { name = '', epoch = '0', role = 0 } = hello.instance ?? {};
    const errors = nameErrors(name, 'hello.instance.name', 1);
    if (epoch === '0') errors.push(wrong('hello.instance.epoch', 'must not be 0'));
    if (role !== ROLE_PREFILL) errors.push(wrong('hello.instance.role', 'must be ROLE_PREFILL'));
    if (!hello.layouts.length) errors.push(wrong('hello.layouts', 'must have at least one'));
    if (errors.length) throw badRequest(...errors);
    this.name(hello.decode_name);
    this.layout(hello);
    checkMeans(hello);
    hello.shards.forEach((shard) => this.shard(shard));
  }

  /** The first of P's layouts that is ours, whatever its packing, ours before others; without one,
   * P hears what is wrong with its best. */
  layout({ layouts }) {
    const faults = layouts.map((layout) => this.layoutFault(layout));
    const fitting = layouts.filter((_, i) => !faults[i]).map(({ format }) => format || 'canonical');
    if (!fitting.length) throw faults[0];
    const own = this.model.layout;
    return { ...own, format: fitting.includes(own.format) ? own.format : fitting[0] };
  }

  /** P's only shard holds every layer and head, whether it counts them or not: the first field
   * that says otherwise. */
  missingPart(shard) {
    const { layers, planes: [{ heads }] } = this.model.layout.groups[0];
    const whole = { layer_start: 0, layer_count: layers, head_start: 0, head_count: heads };
    for (const kind of ['tp', 'pp', 'cp', 'dp']) {
      Object.assign(whole, { [`${kind}_size`]: 1, [`${kind}_rank`]: 0 });
    }
    const field = Object.keys(whole).find((name) => ![0, whole[name]].includes(shard[name]));
    return field && { field, ours: whole[field], theirs: shard[field] };
  }

  shard(shard) {
    const ranks = (shard.tp_size || 1) * (shard.pp_size || 1);
    if (ranks !== 1) throw mismatch('shards', ranks, 1);
    const lacks = this.missingPart(shard);
    if (lacks) throw mismatch(`shards[0].${lacks.field}`, lacks.ours, lacks.theirs);
  }

  layoutFault(layout) {
    const groups = layout.groups.map((group) => ({ ...group, kind: group.kind || FULL }));
    const theirs = { ...layout, groups, format: this.model.layout.format };
    return unbuiltKind(theirs) ?? difference('layout', this.model.layout, theirs);
  }

  allocate(request) {
    checkReserved(request.sampling, request.scope);
    const errors = samplingErrors(samplingOf(request.sampling));
    errors.push(...nameErrors(request.request_id, 'request_id'));
    if (request.prompt_tokens < 1) errors.push(wrong('prompt_tokens', 'must be at least 1'));
    if (request.max_new_tokens < 1) errors.push(wrong('max_new_tokens', 'must be at least 1'));
    if (request.prompt_digest.length !== 32) {
      errors.push(wrong('prompt_digest', 'must have 32 bytes'));
    }
    errors.push(...saltErrors(request.scope), ...this.hashErrors(request));
    if (errors.length) throw badRequest(...errors);
    const { prompt_tokens: prompt, max_new_tokens: output } = request;
    this.length(prompt, output, 'prompt_tokens', request.kv_needed);
  }

  /** This D keeps no KV of one request for another, and makes no use of the names of blocks. */
  hashErrors(request) {
    const hashes = request.block_hashes, { block_size: size } = this.model.layout;
    const fits = hashes.length <= Math.floor(request.prompt_tokens / size);
    if (fits && hashes.every(({ hash }) => hash.length === 16)) return [];
    return [wrong('block_hashes', 'one of 16 bytes for each whole block at most')];
  }

  /** A client's leg, whose tokens, sampling and salt it returns. */
  generate(request) {
    checkReserved(request.sampling, request.scope);
    const sampling = samplingOf(request.sampling), generated = request.generated_token_ids;
    const prompt = request.token_ids?.ids ?? [], kind = request.prompt;
    const errors = [...samplingErrors(sampling), ...nameErrors(request.request_id, 'request_id')];
    errors.push(...saltErrors(request.scope));
    if (kind === 'text' || kind === 'messages') {
      errors.push(wrong(kind, 'is for the router to read; a decode instance takes token_ids'));
    } else if (!prompt.length) {
      errors.push(wrong('token_ids', 'must have at least one token'));
    }
    errors.push(...this.tokenErrors(prompt, 'token_ids.ids'));
    errors.push(...this.tokenErrors(generated, 'generated_token_ids'));
    if (generated.length >= Math.max(1, sampling.max_tokens)) {
      errors.push(wrong('generated_token_ids', 'must be fewer than sampling.max_tokens'));
    }
    if (errors.length) throw badRequest(...errors);
    const left = sampling.max_tokens - generated.length;
    // With one token left, which is P's own, a hand-over needs no KV here.
    this.length(prompt.length + generated.length, left, 'token_ids', left > 1 || !request.handoff);
    return { prompt, generated, sampling, salt: saltOf(request.scope) };
  }

  tokenErrors(ids, field) {
    const { vocab } = this.model, at = ids.findIndex((id) => id >= vocab);
    if (at < 0) return [];
    const limit = `${ids[at]} is outside the vocabulary; ids are below ${vocab}`;
    return [wrong(`${field}[${at}]`, limit)];
  }

  /** Prompt and output must fit the model, and an empty pool where their KV is needed here. */
  length(prompt, output, field, kvNeeded) {
    const limit = this.maxModelLen, blocks = this.model.blocksFor(prompt + output);
    if (prompt >= limit) {
      throw badRequest(wrong(field, `has ${prompt} tokens; the model takes at most ${limit - 1}`));
    }
    const tooLarge = (needed, total, unit) => {
      const text = `prompt plus max_tokens needs ${needed} ${unit}; there are ${total}`;
      return new Fault('TOO_LARGE', text, { metadata: { needed, total, unit } });
    };
    const { length: total } = this.model.pool;
    if (prompt + output > limit) throw tooLarge(prompt + output, limit, 'tokens');
    if (kvNeeded && blocks > total) throw tooLarge(blocks, total, 'blocks');
  }

  /** P's first token: exactly one, which ends the answer where no KV will follow. */
  firstToken(tokens, kvNeeded) {
    if (tokens.length !== 1) throw badRequest(wrong('tokens', 'must have exactly one'));
    const [{ token_id: id, finish_reason: finish, sibling }] = tokens, errors = [];
    if (sibling) throw feature('tokens[0].sibling');
    if (![0, STOP, LENGTH].includes(finish)) {
      errors.push(wrong('tokens[0].finish_reason', `${finish} is no reason`));
    } else if (!kvNeeded && !finish) {
      errors.push(wrong('tokens[0].finish_reason', 'must be set when kv_needed was false'));
    }
    const { vocab } = this.model;
    if (id >= vocab) errors.push(wrong('tokens[0].token_id', `ids are below ${vocab}`));
    if (errors.length) throw badRequest(...errors);
  }

  /** A Transfer's first message; its key. */
  open(open) {
    const errors = nameErrors(open.grant_id, 'open.grant_id', 1);
    const key = this.ref(open.ref, 'open.ref');
    if (errors.length) throw badRequest(...errors);
    if (open.transport > INLINE) throw feature('open.transport', transportName(open.transport));
    const lacks = open.sender && this.missingPart(open.sender);
    if (lacks && /^[cd]p_/.test(lacks.field)) throw feature(`open.sender.${lacks.field}`);
    if (lacks) throw badRequest(wrong('open.sender', `is none of P's shards: ${lacks.field}`));
    if (open.shard_index) {
      throw badRequest(wrong('open.shard_index', 'must be 0: there is one shard'));
    }
    return key;
  }

  /** A chunk's ranges within the `wanted` blocks, and a payload of their size. */
  chunk(chunk, wanted) {
    if (chunk.group > 0) throw badRequest(wrong('chunk.group', 'there is 1'));
    if (chunk.descriptor) throw feature('chunk.descriptor');
    const { layers, layerBytes } = this.model, errors = [];
    if (chunk.layer_count < 1 || chunk.layer_start + chunk.layer_count > layers) {
      errors.push(wrong('chunk.layer_start', `the group has ${layers} layers`));
    }
    if (chunk.block_count < 1 || chunk.block_start + chunk.block_count > wanted) {
      errors.push(wrong('chunk.block_start', `${wanted} blocks are wanted`));
    }
    const size = chunk.layer_count * chunk.block_count * layerBytes, { length } = chunk.payload;
    if (length !== size) {
      errors.push(wrong('chunk.payload', `has ${length} bytes; the ranges take ${size}`));
    }
    if (errors.length) throw badRequest(...errors);
  }
}

module.exports = { Checks, legsDiffer };
