'use strict';
// A decode instance (D) of pd_grpc.v1: it takes KV from any prefill instance (P) into a pool of
// plain Buffers, and answers from what it holds. This file is the whole conversation; beside it
// `sim.js` is the engine, `checks.js` what is refused beforehand, `faults.js` the status table,
// `admin.js` what an operator sees, `wire.js` how gRPC is used, `settings.js` the command line.
//
// JavaScript does one thing at a time, so that plain maps need no locks, and a check and the act it
// allows are one step. Control and bulk have a port each and share this one thread; a D for real KV
// gives bulk a process of its own. The comments of the protos are the rules.

const crypto = require('node:crypto');
const grpc = require('@grpc/grpc-js');
const { HealthImplementation } = require('grpc-health-check');
const { Admin, State } = require('./admin');
const { Checks, legsDiffer } = require('./checks');
const { Code, Fault, badRequest, speak, stageDeadline, wrong, wrongState } = require('./faults');
const { loadProtos } = require('./protos');
const { readSettings } = require('./settings');
const { EOS, SimModel, StopRule, crc32c } = require('./sim');
const {
  BYTES, MESSAGE_BYTES, OPTIONS, Outbox, budgetOf, caught, checkReadable, duration, lenient, listen,
  millis, now, stopTimer, timer, topFields, unary,
} = require('./wire');

const FAREWELL_MS = 500; // for the last statuses to leave
const UNREAD_BYTES = 2 * MESSAGE_BYTES; // that may wait for a P to read them
const MAX_ACK_RANGES = 4096, MAX_HELD_STREAMS = 4096, MAX_PREFILLS = 4096;
const MAX_CLIENT_LEGS = 16384, MAX_TOMBSTONES = 65536;

// --- what everything below shares ----------------------------------------------------------------

const conf = settings();
const { definitions, services } = loadProtos(conf.include);
speak(definitions);

const INLINE = 1, ROLE_DECODE = 2; // Transport, Role
// What a request was doing when its time ended.
const Stage = {
  EXPECTED: 'prefill', WAITING: 'allocate', RESERVED: 'transfer', RECEIVING: 'transfer',
  READY: 'first_token', DECODING: 'decode',
};

const model = new SimModel(conf);
let free = [...model.pool.keys()]; // blocks nobody holds
const me = { name: conf.name, epoch: mintEpoch(), role: ROLE_DECODE };
const check = new Checks(me, model, conf.maxModelLen);

const transfers = new Map(); // by grant_id, which each has from its birth
const byKey = new Map(); // live ones, by "transfer_id#attempt"
const attempts = new Map(); // transfer_id -> the live attempt
const queue = []; // those that wait for blocks, first in first out
const running = new Set(); // those that the engine serves
const localRequests = new Map(); // request_id -> a transfer that D prefills itself
const tombstones = new Map(); // by key, oldest first
const endedAttempts = new Map(); // transfer_id -> the greatest attempt among the tombstones
const endedGrants = new Map(); // grant_id -> the fault that its late streams hear
let draining = null; // {until, timer} once a drain has begun
const admin = new Admin({
  me, check, transfers, byKey, tombstoneOf, newestAttempt, refOf, end,
  free: () => free.length, draining: () => Boolean(draining),
});

const mint = (prefix) => `${prefix}-${crypto.randomBytes(16).toString('hex')}`;
const drainFault = () => new Fault('DRAINING', `${me.name} drains and takes nothing new`);

/** No room for so many blocks, or for one more that waits for them. */
function noRoom(reason, text, needed) {
  return new Fault(reason, text, { quota: { blocks_needed: needed, blocks_free: free.length } });
}

function settings() {
  try {
    return readSettings();
  } catch (error) {
    console.error(`decode.js: ${error.message}`);
    return process.exit(2);
  }
}

function mintEpoch() {
  return String((BigInt(Date.now()) << 20n) | BigInt(crypto.randomInt(1 << 20)));
}

// --- transfers: how each begins, moves and ends --------------------------------------------------

/** A new transfer. It supersedes an older attempt, and is refused when there is a newer one. */
function create(key, budgetMs) {
  const { id, attempt } = checkAttempt(key);
  const older = byKey.get(`${id}#${attempts.get(id)}`);
  if (older) {
    const text = `attempt ${attempt} supersedes attempt ${older.attempt}`;
    const metadata = { attempt: older.attempt, newest: attempt };
    end(older, 'FAILED', new Fault('SUPERSEDED', text, { metadata }));
  }
  const t = {
    key, id, attempt, grantId: mint('g'), requestId: '', state: 'EXPECTED', since: now(),
    created: now(), timers: {}, local: false,
    prefill: null, // P's leg: {owner, request, body, calls, response}
    client: null, // the client's leg
    needed: 0, blocks: [],
    verified: null, missing: 0, stream: null, // KV coming in: blocks of each layer
    kvComplete: false, first: null, handedOff: false,
    tokens: [], output: 0, // prompt and output; how many of them were chosen here or by P
  };
  transfers.set(t.grantId, t);
  byKey.set(key, t);
  attempts.set(id, attempt);
  setBudget(t, now() + budgetMs);
  admin.changed(t);
  return t;
}

/** What a key is of; refused when a newer attempt is known. */
function checkAttempt(key) {
  const at = key.lastIndexOf('#'), id = key.slice(0, at), attempt = Number(key.slice(at + 1));
  const newest = newestAttempt(id);
  if (attempt >= newest) return { id, attempt };
  const text = `attempt ${attempt} of ${id} is older than ${newest}`;
  throw new Fault('STALE_ATTEMPT', text, { metadata: { attempt, newest } });
}

function newestAttempt(id) {
  buryOld();
  return Math.max(attempts.get(id) ?? 0, endedAttempts.get(id) ?? 0);
}

function move(t, state) {
  t.state = state;
  t.since = now();
  admin.changed(t);
}

function setTimer(t, name, ms, then) {
  stopTimer(t.timers[name]);
  t.timers[name] = timer(ms, then);
}

function stopTimers(t, ...names) {
  for (const name of names) {
    stopTimer(t.timers[name]);
    delete t.timers[name];
  }
}

/** End it at `until` at the latest. */
function setBudget(t, until) {
  t.until = until;
  setTimer(t, 'budget', until - now(), () => end(t, 'FAILED', stageDeadline(stageOf(t))));
}

/** A request's time only shrinks. */
function narrowBudget(t, ms) {
  setBudget(t, Math.min(t.until, now() + ms));
}

function stageOf(t) {
  if (t.local && t.state === 'RECEIVING') return 'prefill';
  return t.state === 'READY' && t.first ? 'attach' : Stage[t.state];
}

/** A grant lives for one lease from now. */
function renewLease(t) {
  setTimer(t, 'lease', conf.leaseMs, () => {
    end(t, 'EXPIRED', new Fault('LEASE_EXPIRED', `the lease of ${t.key} ended in ${t.state}`));
  });
}

/** The one way a transfer ends: both legs hear of it, its blocks go back, a tombstone stays.
 *
 * `fault` is null only for a plain release and for a complete answer, which has a `finish`.
 */
function end(t, state, fault, { finish, tellPrefill = true, kept = null } = {}) {
  const calls = [...(t.prefill?.calls.keys() ?? [])];
  move(t, state);
  if (tellPrefill && !t.handedOff && !calls.length) tellEnd(t, fault);
  for (const answer of calls) {
    stopWaiting(t, answer);
    answer(fault ?? new Fault('RELEASED', `${t.key} was released`));
  }
  if (finish) t.client.finish(finish, t);
  else t.client?.fail(fault ?? new Fault('RELEASED', `${t.key} was released by the prefill`));
  bury(t, fault, kept);
  forget(t);
  grantWaiting();
  leaveIfDrained();
}

function bury(t, fault, kept) {
  const { id, attempt, grantId, state, created } = t;
  const info = { ...admin.describe(t), blocks: 0 };
  const stone = { id, attempt, grantId, state, fault, kept, created, ended: now(), info };
  tombstones.set(t.key, stone);
  endedAttempts.set(id, Math.max(attempt, endedAttempts.get(id) ?? 0));
  if (t.verified) {
    const why = fault ?? new Fault('RELEASED', `${t.key} needs no more KV`);
    endedGrants.set(grantId, why);
    t.stream?.outbox.end(why.error());
  }
  buryOld();
}

/** Forget the tombstones whose time is over, or for which there is no room. */
function buryOld() {
  for (const [key, { id, attempt, grantId, ended }] of tombstones) {
    if (tombstones.size <= MAX_TOMBSTONES && ended + conf.tombstoneMs > now()) break;
    tombstones.delete(key);
    endedGrants.delete(grantId);
    if (endedAttempts.get(id) === attempt) endedAttempts.delete(id);
  }
}

function tombstoneOf(key) {
  buryOld();
  return tombstones.get(key);
}

/** Nothing of it is left but what its tombstone says. */
function forget(t) {
  stopTimers(t, ...Object.keys(t.timers));
  transfers.delete(t.grantId);
  byKey.delete(t.key);
  if (attempts.get(t.id) === t.attempt) attempts.delete(t.id);
  if (localRequests.get(t.requestId) === t) localRequests.delete(t.requestId);
  if (queue.includes(t)) queue.splice(queue.indexOf(t), 1);
  running.delete(t);
  free = free.concat(t.blocks);
  t.blocks = [];
}

function tellEnd(t, fault) {
  const session = t.prefill && sessionOfOwner(t.prefill.owner);
  const ended = { ref: refOf(t), status: fault?.status(), state: State[t.state] };
  session?.send({ transfer_ended: ended });
}

function refOf(t) {
  return { transfer_id: t.id, attempt: t.attempt, decode_epoch: me.epoch };
}

/** Take blocks for prompt and output at once, so that what has begun never lacks any. */
function grant(t) {
  t.blocks = free.slice(0, t.needed);
  free = free.slice(t.needed);
  move(t, 'RESERVED');
  if (t.local) {
    move(t, 'RECEIVING');
    run(t);
    return;
  }
  const { request } = t.prefill;
  const wanted = request.kv_needed ? model.blocksFor(request.prompt_tokens) : 0;
  t.prefill.response = {
    grant_id: t.grantId, transport: INLINE, lease: duration(conf.leaseMs),
    wanted: wanted ? [{ start: 0, count: wanted }] : [], shards: wanted ? [shard()] : [],
  };
  renewLease(t);
  if (!wanted) return;
  t.verified = Array.from({ length: model.layers }, () => new Uint8Array(wanted));
  t.missing = wanted * model.layers;
  const early = [...heldStreams].filter(({ open }) => open.grantId === t.grantId);
  for (const stream of early) attachStream(stream, t);
}

/** Grant in the order in which it was asked for: nobody overtakes the one at the head. */
function grantWaiting() {
  while (queue.length && queue[0].needed <= free.length) {
    const t = queue.shift();
    grant(t);
    for (const answer of [...(t.prefill?.calls.keys() ?? [])]) {
      stopWaiting(t, answer);
      answer(t.prefill.response);
    }
  }
}

// --- DecodeService.Session: which P lives --------------------------------------------------------

const sessions = new Map(); // by session_id
const newestEpochs = new Map(); // P's name -> the greatest epoch seen, latest last

const sameOwner = (a, b) => a?.name === b?.name && a?.epoch === b?.epoch;
const sessionOfOwner = (owner) => [...sessions.values()].find((s) => sameOwner(s.owner, owner));
const transfersOf = (owner) => {
  return [...transfers.values()].filter((t) => t.prefill && sameOwner(t.prefill.owner, owner));
};

/** The session that a call names. */
function sessionOf(id) {
  const session = sessions.get(id);
  if (!session) throw noSession();
  return session;
}

function noSession() {
  return new Fault('NO_SESSION', 'the session is unknown or superseded: open a new one');
}

class Session {
  constructor(call) {
    this.id = mint('s');
    this.owner = null; // of P: {name, epoch}; null until hello
    this.previousId = ''; // of the same process; a stream may cross with a new session
    this.load = '';
    this.unread = 0;
    const patienceMs = 2 * conf.heartbeatMs;
    this.outbox = new Outbox(call, {
      written: (message) => { this.unread -= costOf(message); },
      patienceMs,
      impatient: () => this.deaf(`this prefill read nothing for ${patienceMs} ms`),
    });
  }

  send(message) {
    if (this.outbox.ended) return;
    this.unread += costOf(message);
    this.outbox.send(message);
    if (this.unread > UNREAD_BYTES) {
      this.deaf(`more than ${UNREAD_BYTES} bytes wait for this prefill to read them`);
    }
  }

  deaf(text) {
    this.outbox.waiting = [];
    this.stop(new Fault('LEASE_EXPIRED', text));
  }

  receive(message) {
    const kind = message.message;
    checkReadable(message);
    if (!this.owner && kind !== 'hello') throw wrongState('hello must come first', 'session');
    if (this.owner && kind === 'hello') throw wrongState('hello came twice', 'session');
    if (kind === 'hello') this.hello(message.hello);
    if (kind === 'heartbeat') this.heartbeat(message.heartbeat);
    if (kind === 'goodbye') this.goodbye();
  }

  hello(hello) {
    const owner = { name: hello.instance?.name, epoch: hello.instance?.epoch };
    if (draining && !sessionOfOwner(owner)) throw drainFault();
    check.hello(hello);
    this.layout = check.layout(hello);
    noteEpoch(owner);
    const before = [...sessions.values()].find((session) => session.owner.name === owner.name);
    this.owner = owner;
    sessions.set(this.id, this);
    if (before) this.replace(before);
    for (const t of transfersOf(owner)) if (t.timers.lease) renewLease(t);
    this.expectHeartbeat();
    this.send({ welcome: welcomeTo(this) });
    // It comes back, and may have missed the word while it was away.
    if (draining) this.send({ drain: { deadline: duration(draining.until - now()) } });
  }

  /** The newest session of a P owns its grants; of another process of it they are lost. */
  replace(before) {
    before.forget();
    const text = 'a newer session of this prefill took over';
    before.outbox.end(new Fault('SUPERSEDED', text).error());
    if (sameOwner(before.owner, this.owner)) this.previousId = before.id;
    else lose(before.owner, 'its process was replaced by a newer one');
  }

  heartbeat({ sequence, grant_ids: ids }) {
    this.expectHeartbeat();
    const unknown = ids.filter((id) => !this.renew(id));
    this.send({ heartbeat_ack: { sequence, unknown_grant_ids: unknown } });
    const load = loadNow(), text = JSON.stringify(load);
    if (text !== this.load) this.send({ load });
    this.load = text;
  }

  /** Whether the grant is known as this P's. */
  renew(grantId) {
    const t = transfers.get(grantId);
    if (!t?.prefill?.response || !sameOwner(t.prefill.owner, this.owner)) return false;
    // After hand-off the grant is D's own, and there is nothing to renew.
    if (t.timers.lease) renewLease(t);
    return true;
  }

  goodbye() {
    this.forget();
    lose(this.owner, 'it said goodbye');
    this.outbox.end();
  }

  expectHeartbeat() {
    stopTimer(this.silence);
    const text = `no heartbeat for ${2 * conf.heartbeatMs} ms`;
    this.silence = timer(2 * conf.heartbeatMs, () => this.stop(new Fault('LEASE_EXPIRED', text)));
  }

  /** The stream ends, with a fault or, where P ended it, without; its grants live on for grace. */
  stop(fault) {
    this.outbox.end(fault?.error());
    stopTimer(this.silence);
    if (sessions.get(this.id) !== this || this.grace) return;
    this.grace = timer(conf.graceMs, () => {
      this.forget();
      lose(this.owner, 'its session broke and did not come back');
    });
  }

  forget() {
    stopTimer(this.silence);
    stopTimer(this.grace);
    sessions.delete(this.id);
  }
}

/** What a message costs in memory while it waits, about. */
const costOf = ({ heartbeat_ack: ack }) => 256 + (ack?.unknown_grant_ids.join('').length ?? 0);

/** A process that was replaced must not come back once its successor is gone too. */
function noteEpoch({ name, epoch }) {
  const newest = newestEpochs.get(name) ?? '0';
  if (BigInt(newest) > BigInt(epoch)) {
    const text = `prefill ${name} has a newer process`;
    throw new Fault('STALE_EPOCH', text, { metadata: { epoch, newest } });
  }
  newestEpochs.delete(name);
  newestEpochs.set(name, epoch);
  if (newestEpochs.size > MAX_PREFILLS) newestEpochs.delete(newestEpochs.keys().next().value);
}

/** P is gone: what it has not handed off ends. */
function lose(owner, why) {
  const fault = new Fault('PREFILL_LOST', `prefill ${owner.name} is gone: ${why}`);
  for (const t of transfersOf(owner)) if (!t.handedOff) end(t, 'FAILED', fault);
}

const shard = () => ({ endpoint: me.bulk, tp_size: 1 });

function welcomeTo(session) {
  return {
    instance: me, session_id: session.id, features: [], layout: session.layout, transport: INLINE,
    shards: [shard()], max_model_len: conf.maxModelLen,
    lease: duration(conf.leaseMs), grace: duration(conf.graceMs),
    heartbeat: duration(conf.heartbeatMs), kv_progress: duration(conf.kvProgressMs),
    first_token: duration(conf.firstTokenMs), attach: duration(conf.attachMs),
    tombstone: duration(conf.tombstoneMs),
  };
}

function loadNow() {
  const asked = queue.filter((t) => t.prefill);
  return {
    free_blocks: free.length,
    total_blocks: model.pool.length,
    queued_tokens: asked.reduce((sum, t) => sum + t.prefill.request.prompt_tokens, 0),
    queued_requests: queue.length,
    decoding_requests: [...running].filter((t) => t.handedOff).length,
  };
}

function serveSession(call) {
  const session = new Session(call);
  call.on('data', (message) => {
    if (session.outbox.ended) return;
    caught(() => session.receive(message), (fault) => session.stop(fault));
  });
  call.on('end', () => session.stop(null));
  call.on('cancelled', () => {
    session.stop(null);
    session.outbox.close();
  });
}

// --- DecodeService: Allocate, SendFirstToken, Release --------------------------------------------

/** Grant, join, queue or refuse; `answer` hears what comes of it. */
function allocate(request, answer, call) {
  const session = sessionOf(request.session_id);
  const key = check.ref(request.ref, 'ref');
  check.allocate(request);
  if (tombstoneOf(key)) throw new Fault('RELEASED', `${key} has ended`);
  let t = byKey.get(key);
  if (t) checkOwner(t, session);
  const body = fieldsBut(request, ['session_id', 'max_wait', 'budget']);
  if (t?.prefill && !t.prefill.body.equals(body)) {
    throw new Fault('DUPLICATE_TRANSFER', `${key} is in flight with another request body`);
  }
  if (draining && !t?.prefill) throw drainFault();
  const budget = request.budget ? millis(request.budget) : conf.budgetMs;
  if (budget <= 0) throw stageDeadline('allocate');
  if (!t) t = create(key, budget);
  else if (!t.handedOff) narrowBudget(t, budget);
  if (t.prefill?.response) return answer(t.prefill.response);
  if (!t.prefill) joinPrefill(t, session, request, body);
  return waitOrGrant(t, Math.min(millis(request.max_wait), budgetOf(call)), answer, call);
}

/** The bytes that a request came as, fields of later versions included, but for some. */
function fieldsBut(request, names) {
  const { field } = definitions['pd_grpc.v1.AllocateRequest'].type;
  const numbers = field.filter(({ name }) => names.includes(name)).map(({ number }) => number);
  const kept = topFields(request[BYTES]).filter(({ number }) => !numbers.includes(number));
  return Buffer.concat(kept.map(({ bytes }) => bytes));
}

function joinPrefill(t, session, request, body) {
  t.prefill = { owner: session.owner, request, body, calls: new Map(), response: null };
  t.requestId ||= request.request_id;
  const differs = legsDiffer(request, t.client);
  if (!differs) return;
  end(t, 'FAILED', differs, { tellPrefill: false });
  throw differs;
}

function waitOrGrant(t, maxWaitMs, answer, call) {
  if (t.state === 'EXPECTED' && enterQueue(t, maxWaitMs)) return answer(t.prefill.response);
  if (maxWaitMs <= 0) throw noBlocks(t);
  const leave = (fault) => {
    if (!t.prefill?.calls.has(answer)) return;
    stopWaiting(t, answer);
    if (fault) answer(fault);
    if (!t.prefill.calls.size) leaveQueue(t);
  };
  t.prefill.calls.set(answer, timer(maxWaitMs, () => leave(noBlocks(t))));
  call.on('cancelled', () => leave(null));
}

/** True when it was granted at once, false when it waits. */
function enterQueue(t, maxWaitMs) {
  const { kv_needed: needed, prompt_tokens: prompt, max_new_tokens: output } = t.prefill.request;
  t.needed = needed ? model.blocksFor(prompt + output) : 0;
  if (!needed || (!queue.length && t.needed <= free.length)) {
    grant(t);
    return true;
  }
  const full = queue.length >= conf.allocateQueue;
  if (full || maxWaitMs <= 0) {
    abandon(t);
    throw full ? queueFull(t.needed) : noBlocks(t);
  }
  move(t, 'WAITING');
  queue.push(t);
  return false;
}

function noBlocks({ needed }) {
  const text = `${needed} blocks needed, ${free.length} free, and others wait or max_wait is over`;
  return noRoom('NO_BLOCKS', text, needed);
}

function queueFull(needed) {
  return noRoom('QUEUE_FULL', `${conf.allocateQueue} requests wait for blocks already`, needed);
}

function stopWaiting(t, answer) {
  stopTimer(t.prefill.calls.get(answer));
  t.prefill.calls.delete(answer);
}

function leaveQueue(t) {
  queue.splice(queue.indexOf(t), 1);
  abandon(t);
  grantWaiting();
}

/** Without a grant: the client's leg keeps it, or it is forgotten, so that P may ask again. */
function abandon(t) {
  move(t, t.client ? 'EXPECTED' : 'RELEASED');
  if (t.client) t.prefill = null;
  else forget(t);
  leaveIfDrained();
}

function checkOwner(t, session) {
  if (t.local) throw new Fault('NOT_OWNER', `${t.key} belongs to no prefill`);
  if (!t.prefill || sameOwner(t.prefill.owner, session.owner)) return;
  const owner = t.prefill.owner.name;
  throw new Fault('NOT_OWNER', `${t.key} belongs to prefill ${owner}`, { metadata: { owner } });
}

function sendFirstToken(request, answer) {
  const session = sessionOf(request.session_id);
  const key = check.ref(request.ref, 'ref');
  const stone = tombstoneOf(key);
  if (stone) return answer({ state: State[stone.state] });
  const t = byKey.get(key);
  if (!t?.prefill) {
    checkAttempt(key);
    throw new Fault('UNKNOWN_TRANSFER', `${key} is unknown here`);
  }
  checkOwner(t, session);
  if (!t.prefill.response || request.grant_id !== t.grantId) {
    throw wrongState(`${key} is ${t.state} and has no grant '${request.grant_id}'`, t.state);
  }
  check.firstToken(request.tokens, t.prefill.request.kv_needed);
  const [token] = request.tokens;
  if (t.first && JSON.stringify(t.first) !== JSON.stringify(token)) {
    throw new Fault('DUPLICATE_TRANSFER', `${key} has another first token already`);
  }
  if (!t.first) takeFirst(t, token);
  return answer({ state: State[t.state] });
}

function release(request, answer) {
  const session = sessionOf(request.session_id);
  const key = check.ref(request.ref, 'ref');
  const fault = request.cause?.code ? Fault.ofCause(request.cause) : null;
  const stone = tombstoneOf(key);
  if (stone) return answer({ state: State[stone.state] });
  // One that overtook its Allocate is remembered, so that the Allocate is refused.
  const t = byKey.get(key) ?? create(key, conf.budgetMs);
  checkOwner(t, session);
  if (!t.handedOff) end(t, fault ? 'FAILED' : 'RELEASED', fault, { tellPrefill: false });
  return answer({ state: State[t.state] });
}

// --- the hand-off: KV, first token and client, in whatever order they come -----------------------

function kvCompleted(t) {
  t.kvComplete = true;
  move(t, 'READY');
  if (!t.first) {
    const late = () => end(t, 'FAILED', stageDeadline('first_token'));
    setTimer(t, 'firstToken', conf.firstTokenMs, late);
  }
  if (!t.client) {
    const text = `no client came for ${t.key} within ${conf.attachMs} ms`;
    const absent = () => end(t, 'FAILED', new Fault('CLIENT_ABSENT', text));
    setTimer(t, 'attach', conf.attachMs, absent);
  }
  tryHandOff(t);
}

function takeFirst(t, token) {
  t.first = token;
  stopTimers(t, 'firstToken');
  if (token.finish_reason && !t.client) {
    // The whole answer waits for its client. P hears of the end as the answer to its call.
    const kept = { token, allocate: t.prefill.request };
    end(t, 'FINISHED', null, { tellPrefill: false, kept });
  } else if (!showFirst(t, false)) {
    tryHandOff(t);
  }
}

function clientCame(t) {
  stopTimers(t, 'attach');
  if (!showFirst(t, true)) tryHandOff(t);
}

/** P's token is shown at once, for it risks nothing. True when it was also the last. */
function showFirst(t, tellPrefill) {
  if (!t.first || !t.client || t.output) return false;
  return push(t, t.first.token_id, t.first.finish_reason, tellPrefill);
}

/** Show a token of output; true when the answer ends with it. `finish` is another's word for it. */
function push(t, token, finish, tellPrefill = true) {
  t.output += 1;
  t.tokens.push(token);
  const reason = t.client.show(token) || finish;
  if (reason) end(t, 'FINISHED', null, { finish: reason, tellPrefill });
  return Boolean(reason);
}

function tryHandOff(t) {
  if (!t.kvComplete || !t.first) return;
  t.handedOff = true;
  stopTimers(t, 'lease');
  if (!t.client) return;
  setBudget(t, t.client.until); // from here on the client's time alone counts
  if (t.state !== 'READY') return;
  move(t, 'DECODING');
  run(t);
}

// --- the engine: a token for each that runs, then whatever else waits ----------------------------

let stepping = false;

function run(t) {
  running.add(t);
  if (!stepping) setImmediate(step);
  stepping = true;
}

function step() {
  for (const t of running) {
    if (t.handedOff) model.store(t.blocks, t.tokens.length - 1, t.tokens.at(-1));
    else prefillHere(t);
    const { sampling, rule } = t.client;
    push(t, model.next(t.blocks, t.tokens.length, sampling, rule.generated));
  }
  stepping = running.size > 0;
  if (stepping) setImmediate(step);
}

/** Aggregated: the prompt's KV is computed here. */
function prefillHere(t) {
  t.computedFrom = now();
  t.tokens.forEach((token, position) => model.store(t.blocks, position, token));
  t.computedUntil = now();
  t.kvComplete = t.handedOff = true;
  move(t, 'DECODING');
}

// --- TransferService: KV in, acknowledgements out ------------------------------------------------

const heldStreams = new Set(); // whose grant this shard has not heard of yet

function serveTransfer(call) {
  const stream = { open: null, t: null, chunks: 0, bytes: 0, told: 0 };
  const written = ({ ack }) => {
    stream.told = ack?.accepted_bytes ?? stream.told;
    call.resume();
  };
  stream.outbox = new Outbox(call, { written });
  call.on('data', (message) => {
    if (stream.outbox.ended) return;
    caught(() => receive(stream, message), (fault) => failStream(stream, fault));
    // With so much unacknowledged nothing more is read.
    if (stream.outbox.last?.ack?.ranges.length >= MAX_ACK_RANGES) call.pause();
  });
  // Whatever it was that ended it: without an end, the grant waits for another stream.
  call.on('end', () => {
    detach(stream);
    stream.outbox.end();
  });
  call.on('cancelled', () => {
    detach(stream);
    stream.outbox.close();
  });
}

function receive(stream, message) {
  checkReadable(message);
  if (message.message === 'open') openStream(stream, message.open);
  else if (message.message === 'chunk') takeChunk(stream, message.chunk);
  else if (message.message === 'end') completeStream(stream, message.end);
  else throw badRequest(wrong('message', 'must be open, chunk or end'));
}

function detach(stream) {
  heldStreams.delete(stream);
  stopTimer(stream.hold);
  if (stream.t?.stream === stream) stream.t.stream = null;
}

/** What P sent is wrong: its stream ends and, once opened, so does the transfer. */
function failStream(stream, fault) {
  const { t } = stream;
  detach(stream);
  stream.outbox.end(fault.error());
  if (!t || !transfers.has(t.grantId) || t.kvComplete) return;
  // That a range was bad the client hears as a defect, for it is P's.
  const code = fault.reason === 'BAD_REQUEST' ? Code.INTERNAL : fault.code;
  const told = new Fault(fault.reason, `the KV transfer failed: ${fault.message}`, { code });
  told.details = fault.details.slice(0, 1);
  end(t, 'FAILED', told);
}

function openStream(stream, open) {
  if (stream.open) throw wrongState('open came twice', 'open');
  const key = check.open(open), grantId = open.grant_id;
  const named = ({ id, previousId }) => [id, previousId].includes(open.session_id);
  const session = [...sessions.values()].find((one) => open.session_id && named(one));
  if (!session) throw noSession();
  stream.open = { grantId, key, owner: session.owner };
  buryOld();
  if (endedGrants.has(grantId)) throw endedGrants.get(grantId);
  const t = transfers.get(grantId);
  if (t?.verified) attachStream(stream, t);
  else holdStream(stream);
}

/** P may be faster than the news of its grant. */
function holdStream(stream) {
  if (heldStreams.size >= MAX_HELD_STREAMS) {
    const text = `${MAX_HELD_STREAMS} streams wait for the news of their grants already`;
    throw noRoom('QUEUE_FULL', text, 0);
  }
  const unknown = new Fault('UNKNOWN_TRANSFER', `grant ${stream.open.grantId} is unknown here`);
  heldStreams.add(stream);
  stream.hold = timer(conf.kvProgressMs, () => failStream(stream, unknown));
}

function attachStream(stream, t) {
  detach(stream);
  const { key, owner } = stream.open, whose = key === t.key ? 'prefill' : 'transfer';
  if (key !== t.key || !sameOwner(owner, t.prefill.owner)) {
    const text = `grant ${t.grantId} belongs to another ${whose}`;
    stream.outbox.end(new Fault('NOT_OWNER', text).error());
    return;
  }
  const superseded = new Fault('SUPERSEDED', 'a newer stream for the same grant took over');
  t.stream?.outbox.end(superseded.error());
  t.stream = stream;
  stream.t = t;
  const verified = t.verified.flatMap(verifiedRanges);
  stream.outbox.send({ opened: { verified, window_bytes: conf.windowBytes } });
  if (t.state === 'RESERVED') move(t, 'RECEIVING');
}

function verifiedRanges(blocks, layer) {
  const ranges = [];
  blocks.forEach((there, block) => {
    if (!there) return;
    if (blocks[block - 1]) ranges.at(-1).block_count += 1;
    else ranges.push({ layer_start: layer, layer_count: 1, block_start: block, block_count: 1 });
  });
  return ranges;
}

function transferOf(stream) {
  if (!stream.t) throw wrongState('opened has not been answered', 'open');
  return stream.t;
}

function takeChunk(stream, chunk) {
  const t = transferOf(stream);
  check.chunk(chunk, t.verified[0].length);
  checkWindow(stream, chunk.payload.length);
  checkSum(chunk);
  const lacking = write(t, chunk);
  t.missing -= lacking;
  stream.chunks += 1;
  stream.bytes += chunk.payload.length;
  if (lacking && t.timers.lease) renewLease(t);
  acknowledge(stream, chunk);
}

/** What a sender knows to be unacknowledged is never less than what is so here. */
function checkWindow(stream, length) {
  const unacknowledged = stream.bytes - stream.told, reached = unacknowledged + length;
  // A chunk alone may be larger than the window.
  if (!unacknowledged || reached <= conf.windowBytes) return;
  const text = `${reached} bytes would be unacknowledged; the window is ${conf.windowBytes}`;
  throw badRequest(wrong('chunk.payload', text));
}

function checkSum(chunk) {
  if (crc32c(chunk.payload) === chunk.crc32c) return;
  const layers = `[${chunk.layer_start}, ${chunk.layer_start + chunk.layer_count})`;
  const blocks = `[${chunk.block_start}, ${chunk.block_start + chunk.block_count})`;
  const text = `checksum differs for layers ${layers}, blocks ${blocks} of group 0`;
  throw new Fault('KV_CORRUPT', text, { metadata: { group: 0, layers, blocks } });
}

/** Write what is not verified yet, and no more: D may be decoding from it. Returns how much. */
function write(t, { layer_start: layer0, layer_count: layers, block_start: block0, payload }) {
  let lacking = 0;
  for (let at = 0, i = 0; at < payload.length; at += model.layerBytes, i++) {
    const layer = layer0 + (i % layers), block = block0 + Math.floor(i / layers);
    if (t.verified[layer][block]) continue;
    model.writeLayer(t.blocks[block], layer, payload.subarray(at, at + model.layerBytes));
    t.verified[layer][block] = 1;
    lacking += 1;
  }
  return lacking;
}

/** Acks that pile up behind a slow reader become one. */
function acknowledge(stream, { layer_start, layer_count, block_start, block_count }) {
  const range = { group: 0, layer_start, layer_count, block_start, block_count };
  const waiting = stream.outbox.last?.ack;
  if (!waiting) {
    stream.outbox.send({ ack: { ranges: [range], accepted_bytes: stream.bytes } });
    return;
  }
  waiting.ranges.push(range);
  waiting.accepted_bytes = stream.bytes;
}

function completeStream(stream, { chunks, bytes }) {
  const t = transferOf(stream);
  const came = `${stream.chunks} chunks of ${stream.bytes} bytes`;
  const announced = `${chunks} chunks of ${bytes} bytes`;
  if (came !== announced) {
    throw badRequest(wrong('end', `${came} came, ${announced} were announced`));
  }
  if (t.missing) {
    const layer = t.verified.findIndex((blocks) => blocks.includes(0));
    const first = `layer ${layer}, block ${t.verified[layer].indexOf(0)}`;
    throw badRequest(wrong('end', `${t.missing} layers of blocks have not come: ${first} first`));
  }
  detach(stream);
  stream.outbox.send({ completed: { chunks, bytes } });
  stream.outbox.end();
  if (t.kvComplete) return;
  renewLease(t);
  kvCompleted(t);
}

// --- InferenceService ----------------------------------------------------------------------------

/** A client's leg, and the tokens on their way to it: as many in a message as wait. */
class Client {
  constructor(call, { prompt, generated, sampling, salt }, budgetMs) {
    Object.assign(this, { prompt, generated, sampling, salt });
    this.until = now() + budgetMs;
    this.rule = new StopRule(sampling, generated);
    this.outbox = new Outbox(call);
  }

  /** Show a token; the reason if the answer ends with it. */
  show(token) {
    if (this.outbox.last) this.outbox.last.token_ids.push(token);
    else this.outbox.send({ token_ids: [token] });
    return this.rule.push(token);
  }

  finish(reason, { created, computedFrom, computedUntil }) {
    if (!this.outbox.last) this.outbox.waiting.push({ token_ids: [] });
    const usage = { prompt_tokens: this.prompt.length, completion_tokens: this.rule.generated };
    const timings = computedUntil && {
      queue: duration(computedFrom - created), compute: duration(computedUntil - computedFrom),
    };
    const last = { finish_reason: reason, usage, timings, decode_instance: me.name };
    Object.assign(this.outbox.last, last);
    this.outbox.end();
  }

  fail(fault) {
    this.outbox.end(fault.error(fault.clientCode));
  }
}

function serveGenerate(call) {
  const left = budgetOf(call), budget = left === Infinity ? conf.budgetMs : left;
  const { request } = call;
  const begin = () => {
    checkReadable(request);
    const client = new Client(call, check.generate(request), budget);
    const serve = request.handoff ? attachClient : beginLocal;
    const t = serve(request, client, budget);
    call.on('cancelled', () => clientLeft(client, t));
  };
  refusing(call, begin);
}

/** Begin to answer a stream, or end it with the fault that a client sees. */
function refusing(call, begin) {
  caught(begin, (fault) => call.emit('error', fault.error(fault.clientCode)));
}

/** The client's leg of a hand-over, which P's may follow or precede. */
function attachClient(request, client, budget) {
  check.name(request.handoff.decode_name);
  const key = check.ref(request.handoff.ref, 'handoff.ref', true);
  const stone = tombstoneOf(key);
  if (stone) return answerLate(key, stone, client);
  let t = byKey.get(key);
  if (t?.client) throw new Fault('DUPLICATE_TRANSFER', `${key} has a client already`);
  if (!t) {
    if (draining) throw drainFault();
    checkRoomForLeg();
    t = create(key, budget);
  }
  t.client = client;
  t.tokens = [...client.prompt, ...client.generated];
  t.requestId = request.request_id || t.requestId;
  narrowBudget(t, budget);
  const differs = legsDiffer(t.prefill?.request, client);
  if (differs) end(t, 'FAILED', differs);
  else clientCame(t);
  return t;
}

/** Legs cost no blocks, but their prompts are kept. */
function checkRoomForLeg() {
  const legs = [...transfers.values()].filter((t) => t.state === 'EXPECTED').length;
  if (legs < MAX_CLIENT_LEGS) return;
  throw noRoom('QUEUE_FULL', `${legs} clients wait for their prefill already`, 0);
}

/** The transfer ended before its client came: it hears how, or gets the answer that was kept. */
function answerLate(key, { fault, kept }, client) {
  if (!kept) throw fault ?? new Fault('RELEASED', `${key} has ended`);
  const differs = legsDiffer(kept.allocate, client);
  if (differs) throw differs;
  client.show(kept.token.token_id);
  client.finish(kept.token.finish_reason, {});
  return null;
}

/** Aggregated: D prefills the request itself, in the same queue for blocks as everyone. */
function beginLocal(request, client, budget) {
  if (draining) throw drainFault();
  const requestId = request.request_id;
  const needed = model.blocksFor(client.prompt.length + client.sampling.max_tokens);
  if (localRequests.has(requestId)) {
    throw new Fault('DUPLICATE_REQUEST', `request ${requestId} is in flight`);
  }
  const waits = queue.length > 0 || needed > free.length;
  if (waits && queue.length >= conf.allocateQueue) throw queueFull(needed);
  const t = create(`${mint('local')}#1`, budget);
  const tokens = [...client.prompt, ...client.generated];
  Object.assign(t, { local: true, client, requestId, tokens, needed });
  if (requestId) localRequests.set(requestId, t);
  move(t, 'WAITING');
  queue.push(t);
  grantWaiting();
  return t;
}

function clientLeft(client, t) {
  client.outbox.close();
  if (!t || !transfers.has(t.grantId)) return;
  t.client = null;
  end(t, 'RELEASED', new Fault('CLIENT_GONE', `the client of ${t.key} has left`));
}

function getModelInfo(request, answer) {
  return answer({
    model: 'sim', tokenizer: 'sim', max_model_len: conf.maxModelLen, vocab_size: conf.vocab,
    eos_token_ids: [EOS], layout: model.layout, features: [],
  });
}

// --- the drain, and the end ----------------------------------------------------------------------

/** Take nothing new, finish what runs, then exit. Of two deadlines the earlier counts. */
function drain(request, answer) {
  const ms = request.deadline ? millis(request.deadline) : conf.drainMs;
  if (ms < 0) throw badRequest(wrong('deadline', 'must not be negative'));
  const begins = !draining, until = Math.min(now() + ms, draining?.until ?? Infinity);
  stopTimer(draining?.timer);
  draining = { until, timer: timer(until - now(), endAll) };
  answer({ transfers: transfers.size });
  if (begins) beginDrain();
}

function beginDrain() {
  setReady(false);
  const deadline = duration(draining.until - now());
  for (const session of sessions.values()) session.send({ drain: { deadline } });
  // Those that wait for blocks do better elsewhere.
  for (const t of queue.filter(({ prefill }) => prefill)) {
    for (const answer of [...t.prefill.calls.keys()]) {
      stopWaiting(t, answer);
      answer(drainFault());
    }
    leaveQueue(t);
  }
  // And so do clients whose Allocate has not come; nothing is remembered of them.
  for (const t of [...transfers.values()].filter(({ state }) => state === 'EXPECTED')) {
    move(t, 'FAILED');
    t.client.fail(drainFault());
    forget(t);
  }
  leaveIfDrained();
}

function endAll() {
  for (const t of [...transfers.values()]) end(t, 'FAILED', drainFault());
}

function leaveIfDrained() {
  if (draining && !transfers.size) leave();
}

let leaving = false;

/** Say goodbye to every P, let the last words out, and exit. */
function leave() {
  if (leaving) return;
  leaving = true;
  draining ??= { until: now() };
  setReady(false);
  endAll();
  admin.close(new Fault('DRAINING', `${me.name} is stopping`));
  for (const session of [...sessions.values()]) {
    session.forget();
    session.send({ goodbye: { reason: 'this decode instance stops' } });
    session.outbox.end();
  }
  const closed = [control, bulk].map((server) => {
    return new Promise((done) => { server.tryShutdown(done); });
  });
  setTimeout(() => process.exit(0), FAREWELL_MS).unref();
  Promise.all(closed).then(() => process.exit(0));
}

// --- serving -------------------------------------------------------------------------------------

const control = new grpc.Server(OPTIONS), bulk = new grpc.Server(OPTIONS);
const health = new HealthImplementation({ '': 'SERVING' });

function setReady(ready) {
  for (const name of ['DecodeService', 'InferenceService', 'AdminService']) {
    health.setStatus(`pd_grpc.v1.${name}`, ready ? 'SERVING' : 'NOT_SERVING');
  }
}

function addServices() {
  control.addService(lenient(services.DecodeService.service), {
    Session: serveSession, Allocate: unary(allocate), SendFirstToken: unary(sendFirstToken),
    Release: unary(release),
  });
  control.addService(lenient(services.InferenceService.service), {
    Generate: serveGenerate, GetModelInfo: unary(getModelInfo),
  });
  control.addService(lenient(services.AdminService.service), {
    GetServerInfo: unary((...call) => admin.getServerInfo(...call)),
    ListTransfers: unary((...call) => admin.listTransfers(...call)),
    GetTransfer: unary((...call) => admin.getTransfer(...call)),
    ReleaseTransfer: unary((...call) => admin.releaseTransfer(...call)),
    WatchTransfers: (call) => refusing(call, () => admin.watchTransfers(call)),
    Drain: unary(drain),
  });
  health.addToServer(control);
  bulk.addService(lenient(services.TransferService.service), { Transfer: serveTransfer });
}

async function main() {
  addServices();
  me.bulk = await listen(bulk, conf.host, conf.bulkPort);
  me.control = await listen(control, conf.host, conf.port);
  me.name ||= `decode-${me.control.split(':').at(-1)}`;
  setReady(true);
  for (const signal of ['SIGTERM', 'SIGINT']) process.on(signal, leave);
  const ready = { name: me.name, epoch: me.epoch, endpoint: me.control, bulk: me.bulk };
  console.log(JSON.stringify(ready));
}

main().catch((error) => {
  console.error(`decode.js: ${error.message}`);
  process.exit(1);
});
