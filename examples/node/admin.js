'use strict';
// AdminService but for Drain: what an operator and a router see of D's transfers.

const grpc = require('@grpc/grpc-js');
const { Fault, badRequest, wrong } = require('./faults');
const { Outbox, checkReadable, duration, now } = require('./wire');

const [FREE, RESERVED, RECEIVING, DECODING] = [1, 3, 4, 5]; // BlockState
const [SERVING, DRAINING] = [1, 3]; // Health
const NORMAL_PAGE = 1000, MAX_PAGE = 10000, MAX_REASON = 256;
const WATCH_QUEUE = 1024; // changes kept for one slow reader

// TransferState, of D's.
const State = {
  EXPECTED: 1, WAITING: 2, RESERVED: 3, RECEIVING: 4, READY: 5, DECODING: 6,
  FINISHED: 8, FAILED: 9, RELEASED: 10, EXPIRED: 11,
};
const LAST_STATE = 41; // of the protocol's

class Admin {
  /** `d` gives what it looks at: see where decode.js makes one. */
  constructor(d) {
    this.d = d;
    this.watchers = new Set();
    this.ended = new Map(); // state -> transfers ended since start
  }

  describe(t) {
    const { prefill, client } = t;
    return {
      ref: this.d.refOf(t), request_id: t.requestId, state: State[t.state],
      age: duration(now() - t.created), state_age: duration(now() - t.since),
      blocks: t.blocks.length, peer: prefill?.owner.name,
      prompt_tokens: client?.prompt.length ?? prefill?.request.prompt_tokens,
      generated_tokens: client?.rule.generated ?? t.output,
    };
  }

  /** One that has ended, as its tombstone has it. */
  describeEnded({ info, created, ended, fault }) {
    const ages = { age: duration(now() - created), state_age: duration(now() - ended) };
    return { ...info, ...ages, last_error: fault?.status() };
  }

  getServerInfo(request, answer) {
    const { me, free, transfers, draining } = this.d;
    const blocks = new Map([[FREE, free()]]), states = new Map();
    for (const t of transfers.values()) {
      const state = { RESERVED, RECEIVING }[t.state] ?? DECODING;
      blocks.set(state, (blocks.get(state) ?? 0) + t.blocks.length);
      states.set(t.state, (states.get(t.state) ?? 0) + 1);
    }
    const held = [...blocks].filter(([, number]) => number);
    const server = {
      instance: me, endpoint: me.control, model: 'sim', uptime: duration(now()),
      health: draining() ? DRAINING : SERVING, health_reason: draining() ? 'draining' : '',
      blocks: held.map(([state, number]) => ({ state, blocks: number })),
      transfers: counted(states), ended: counted(this.ended),
    };
    answer({ server });
  }

  listTransfers(request, answer) {
    const { states, page_size: size } = request, errors = [];
    states.forEach((state, i) => {
      const known = state > 0 && state <= LAST_STATE;
      if (!known) errors.push(wrong(`states[${i}]`, `${state} is no state of a transfer`));
    });
    if (size > MAX_PAGE) errors.push(wrong('page_size', `must be at most ${MAX_PAGE}`));
    if (errors.length) throw badRequest(...errors);
    const wanted = (t) => !states.length || states.includes(State[t.state]);
    const rest = this.after(request.page_token).filter(wanted);
    const page = rest.slice(0, size || NORMAL_PAGE);
    const token = rest.length > page.length ? page.at(-1).key : '';
    answer({ transfers: page.map((t) => this.describe(t)), next_page_token: token });
  }

  /** Those behind the last transfer of the page before, oldest first. */
  after(token) {
    const live = [...this.d.transfers.values()];
    if (!token) return live;
    const last = this.d.byKey.get(token), stone = this.d.tombstoneOf(token);
    if (last) return live.slice(live.indexOf(last) + 1);
    // That one has ended since; its age still says where it stood.
    if (stone) return live.filter((t) => t.created > stone.created);
    throw badRequest(wrong('page_token', 'names no transfer that is remembered; begin again'));
  }

  getTransfer(request, answer) {
    answer(this.shown(this.keyNamed(request)));
  }

  /** End one by hand; one that has ended stays as it is. */
  releaseTransfer(request, answer) {
    const key = this.keyNamed(request), t = this.d.byKey.get(key);
    const reason = request.reason || 'no reason given';
    if ([...reason].length > MAX_REASON) {
      throw badRequest(wrong('reason', `must have at most ${MAX_REASON} characters`));
    }
    const fault = new Fault('RELEASED', `released by an operator: ${reason}`);
    if (t) this.d.end(t, 'RELEASED', fault);
    answer(this.shown(key));
  }

  /** The key that an operator means; attempt 0 is the newest. */
  keyNamed({ transfer_id: id, attempt }) {
    this.d.check.transferId(id, 'transfer_id');
    return `${id}#${attempt || this.d.newestAttempt(id)}`;
  }

  shown(key) {
    const stone = this.d.tombstoneOf(key), live = this.d.byKey.get(key);
    if (live) return { transfer: this.describe(live) };
    if (stone) return { transfer: this.describeEnded(stone) };
    throw new Fault('UNKNOWN_TRANSFER', `no transfer ${key} is known here`);
  }

  watchTransfers(call) {
    checkReadable(call.request);
    const { transfer_id: id } = call.request;
    if (id) this.d.check.transferId(id, 'transfer_id');
    const watcher = { id, outbox: new Outbox(call) };
    // Tells the caller that it misses nothing from here on.
    call.sendMetadata(new grpc.Metadata());
    this.watchers.add(watcher);
    call.on('cancelled', () => {
      watcher.outbox.close();
      this.watchers.delete(watcher);
    });
  }

  /** A transfer has another state. */
  changed(t) {
    if (t.state in ENDS) this.ended.set(t.state, (this.ended.get(t.state) ?? 0) + 1);
    for (const { id, outbox } of this.watchers) {
      if (id && id !== t.id) continue;
      outbox.send({ transfer: this.describe(t), skipped: 0 });
      if (outbox.waiting.length > WATCH_QUEUE) dropOldest(outbox);
    }
  }

  /** D leaves. */
  close(fault) {
    for (const { outbox } of this.watchers) outbox.end(fault.error());
  }
}

const ENDS = { FINISHED: true, FAILED: true, RELEASED: true, EXPIRED: true };

/** The oldest change makes room, for the newest state is what counts. */
function dropOldest({ waiting }) {
  const { skipped } = waiting.shift();
  waiting[0].skipped += skipped + 1;
}

function counted(counts) {
  return [...counts].map(([state, number]) => ({ state: State[state], transfers: number }));
}

module.exports = { Admin, State };
