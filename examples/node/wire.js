'use strict';
// gRPC as decode.js uses it: time on the wire, streams out, handlers that end with a Fault.

const grpc = require('@grpc/grpc-js');
const { Reader } = require('protobufjs/minimal');
const { Fault, badRequest, wrong } = require('./faults');

const HOP_MARGIN_MS = 100; // every hop answers so long before its caller's own timer fires
const MESSAGE_BYTES = 16 << 20;
const LONGEST_TIMER_MS = 2 ** 31 - 1;
const UNREADABLE = {}; // what a handler gets for a request that is no protobuf
const BYTES = Symbol('bytes'); // of a request: what it came as

/** Of every server. */
const OPTIONS = {
  'grpc.max_receive_message_length': MESSAGE_BYTES,
  'grpc.max_send_message_length': MESSAGE_BYTES,
};

/** Monotonic, in ms. */
const now = () => performance.now();

/** A Duration in ms. */
const millis = (value) => (value ? Number(value.seconds) * 1000 + value.nanos / 1e6 : 0);

/** Milliseconds as a Duration, not below 0. */
function duration(ms) {
  const nanos = Math.round(Math.max(0, ms) * 1e6);
  return { seconds: Math.floor(nanos / 1e9), nanos: nanos % 1e9 };
}

/** What is left of a call, in ms, less this hop's margin; Infinity when it has no deadline. */
function budgetOf(call) {
  const left = Number(call.getDeadline()) - Date.now();
  if (!Number.isFinite(left)) return Infinity;
  // The wire rounds up, to 10 ms below 10 s, to 100 ms below 100 s and so on.
  let step = 1;
  while (left >= 1000 * step) step *= 10;
  return Math.max(0, left - step - HOP_MARGIN_MS);
}

/** Run `then` in `ms`, however long that is, and not before what has come by then was read.
 *
 * A thread that was busy must not take a peer for silent.
 */
function timer(ms, then) {
  const handle = {};
  const fire = () => { handle.due = setImmediate(then); };
  const arm = (left) => {
    const part = Math.min(Math.max(0, left), LONGEST_TIMER_MS);
    handle.id = setTimeout(() => (left > part ? arm(left - part) : fire()), part);
  };
  arm(ms);
  return handle;
}

function stopTimer(handle) {
  clearTimeout(handle?.id);
  clearImmediate(handle?.due);
}

/** What goes out on a stream: one message at a time, so that those that wait may be joined. */
class Outbox {
  constructor(call, { written = () => {}, patienceMs = Infinity, impatient } = {}) {
    Object.assign(this, { call, written, patienceMs, impatient, waiting: [], ended: false });
  }

  get last() {
    return this.waiting.at(-1);
  }

  send(message) {
    if (!this.ended) this.waiting.push(message);
    this.flush();
  }

  /** End the call once what was sent before has left; the first end counts. */
  end(error = null) {
    if (this.ended) return;
    Object.assign(this, { ended: true, error });
    this.flush();
  }

  flush() {
    if (this.busy || this.closed) return;
    if (this.waiting.length) this.write(this.waiting.shift());
    else if (this.ended) this.hangUp();
  }

  write(message) {
    this.busy = true;
    if (this.impatient) this.patience = timer(this.patienceMs, this.impatient);
    this.call.write(message, () => {
      stopTimer(this.patience);
      this.busy = false;
      this.written(message);
      this.flush();
    });
  }

  hangUp() {
    this.closed = true;
    if (this.error) this.call.emit('error', this.error);
    else this.call.end();
  }

  /** The reader has left. */
  close() {
    stopTimer(this.patience);
    Object.assign(this, { ended: true, closed: true, waiting: [] });
  }
}

/** Do something, and hand its Fault to `refuse`.
 *
 * Anything else that is thrown is a defect of this program: it is written to stderr, and fails this
 * call alone.
 */
function caught(work, refuse) {
  try {
    work();
  } catch (error) {
    if (error instanceof Fault) return refuse(error);
    console.error(error);
    return refuse(new Fault('ENGINE_ERROR', `a defect of this decode instance: ${error.message}`));
  }
}

/** A unary method: `handle` gives `answer` a message or a Fault, now or later, or throws one. */
function unary(handle) {
  return (call, callback) => {
    const answer = (result) => {
      if (result instanceof Fault) callback(result.error());
      else callback(null, result);
    };
    const work = () => {
      checkReadable(call.request);
      handle(call.request, answer, call);
    };
    caught(work, answer);
  };
}

/** BAD_REQUEST for what was no protobuf. */
function checkReadable(message) {
  if (message === UNREADABLE) throw badRequest(wrong('message', 'is no protobuf'));
}

/** A message's fields in the order in which they came, known or not: {number, bytes}. */
function topFields(message) {
  const reader = Reader.create(message), fields = [];
  while (reader.pos < reader.len) {
    const from = reader.pos, tag = reader.uint32();
    reader.skipType(tag & 7);
    fields.push({ number: tag >>> 3, bytes: message.subarray(from, reader.pos) });
  }
  return fields;
}

/** A service whose requests keep their bytes, and whose handlers get the unreadable ones too. */
function lenient(service) {
  const readOr = (method) => (bytes) => {
    try {
      return Object.assign(method.requestDeserialize(bytes), { [BYTES]: bytes });
    } catch {
      return UNREADABLE;
    }
  };
  const methods = Object.entries(service).map(([name, method]) => {
    return [name, { ...method, requestDeserialize: readOr(method) }];
  });
  return Object.fromEntries(methods);
}

/** Listen on host and port, 0 for any; returns host:port. */
function listen(server, host, port) {
  return new Promise((resolve, reject) => {
    const credentials = grpc.ServerCredentials.createInsecure();
    server.bindAsync(`${host}:${port}`, credentials, (error, bound) => {
      if (error) reject(error);
      else resolve(`${host}:${bound}`);
    });
  });
}

module.exports = {
  BYTES, MESSAGE_BYTES, OPTIONS, Outbox, budgetOf, caught, checkReadable, duration, lenient, listen,
  millis, now, stopTimer, timer, topFields, unary,
};
