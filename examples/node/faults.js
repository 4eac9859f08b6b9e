'use strict';
// The status table: every way the conversation fails, and how a failure travels.

const grpc = require('@grpc/grpc-js');
const { errorInfo } = require('./protos');

const { status: Code } = grpc;
const MESSAGE_BYTES = 1024, VALUE_BYTES = 512; // a status travels in trailers, which are bounded
const RETRY_AFTER = { seconds: 0, nanos: 250e6 };

// Each reason's code and, where it differs, the code that a client sees.
const STATUS_TABLE = {
  BAD_REQUEST: [Code.INVALID_ARGUMENT],
  TOO_LARGE: [Code.INVALID_ARGUMENT],
  HANDOFF_MISMATCH: [Code.INVALID_ARGUMENT, Code.INTERNAL],
  NO_BLOCKS: [Code.RESOURCE_EXHAUSTED],
  QUEUE_FULL: [Code.RESOURCE_EXHAUSTED],
  DUPLICATE_TRANSFER: [Code.ALREADY_EXISTS],
  DUPLICATE_REQUEST: [Code.ALREADY_EXISTS],
  STALE_EPOCH: [Code.FAILED_PRECONDITION, Code.UNAVAILABLE],
  WRONG_INSTANCE: [Code.FAILED_PRECONDITION, Code.UNAVAILABLE],
  STALE_ATTEMPT: [Code.ABORTED],
  SUPERSEDED: [Code.ABORTED],
  RELEASED: [Code.ABORTED],
  UNKNOWN_TRANSFER: [Code.NOT_FOUND, Code.UNAVAILABLE],
  LEASE_EXPIRED: [Code.NOT_FOUND, Code.UNAVAILABLE],
  NO_SESSION: [Code.FAILED_PRECONDITION, Code.INTERNAL],
  WRONG_STATE: [Code.FAILED_PRECONDITION, Code.INTERNAL],
  LAYOUT_MISMATCH: [Code.FAILED_PRECONDITION, Code.UNAVAILABLE],
  FEATURE: [Code.UNIMPLEMENTED],
  KV_CORRUPT: [Code.DATA_LOSS, Code.UNAVAILABLE],
  DRAINING: [Code.UNAVAILABLE],
  NO_INSTANCE: [Code.UNAVAILABLE],
  PREFILL_LOST: [Code.UNAVAILABLE],
  DECODE_LOST: [Code.UNAVAILABLE],
  ENGINE_STUCK: [Code.UNAVAILABLE],
  SENDER_STUCK: [Code.UNAVAILABLE],
  ENGINE_ERROR: [Code.INTERNAL],
  CLIENT_GONE: [Code.CANCELLED],
  CLIENT_ABSENT: [Code.DEADLINE_EXCEEDED],
  STAGE_DEADLINE: [Code.DEADLINE_EXCEEDED],
  CREDENTIALS: [Code.UNAUTHENTICATED],
  ROLE: [Code.PERMISSION_DENIED],
  NOT_OWNER: [Code.PERMISSION_DENIED],
};

let definitions; // of the protos, once `speak` has been called

/** Say with which definitions statuses are written and read. */
function speak(loaded) {
  definitions = loaded;
}

/** A failure with everything its google.rpc.Status carries.
 *
 * `metadata` goes into ErrorInfo, `fields` into BadRequest, `quota` (blocks needed and free) into
 * QuotaFailure with a RetryInfo beside it. `code` is the table's unless it was mapped on its way.
 */
class Fault extends Error {
  constructor(reason, message, { metadata = {}, fields = [], quota, code } = {}) {
    super(cut(message, MESSAGE_BYTES));
    this.reason = reason;
    this.code = code ?? STATUS_TABLE[reason][0];
    const info = { domain: 'pd_grpc', reason, metadata: texts({ ...metadata, ...quota }) };
    this.details = [any('ErrorInfo', info)];
    if (fields.length) this.details.push(any('BadRequest', { field_violations: fields }));
    if (quota) {
      const description = `${quota.blocks_needed} blocks needed, ${quota.blocks_free} free`;
      this.details.push(any('RetryInfo', { retry_delay: RETRY_AFTER }));
      this.details.push(any('QuotaFailure', { violations: [{ subject: 'blocks', description }] }));
    }
  }

  /** P's cause for giving a transfer back, whole; what is none of ours means that P was lost. */
  static ofCause({ code, message, details }) {
    const reason = errorInfo(definitions, { details })?.reason;
    const known = code in Code ? code : Code.UNKNOWN;
    if (!(reason in STATUS_TABLE)) {
      const text = `the prefill gave up: ${Code[known]}: ${message}`;
      return new Fault('PREFILL_LOST', text, { metadata: { cause: Code[known] } });
    }
    return Object.assign(new Fault(reason, message, { code: known }), { details });
  }

  /** The code that the table lets a client see; one that was mapped already stays. */
  get clientCode() {
    const [own, clients = own] = STATUS_TABLE[this.reason];
    return this.code === own ? clients : this.code;
  }

  /** As a google.rpc.Status. */
  status(code = this.code) {
    return { code, message: this.message, details: this.details };
  }

  /** As grpc-js ends a call with it. */
  error(code = this.code) {
    const metadata = new grpc.Metadata();
    const status = definitions['google.rpc.Status'].serialize(this.status(code));
    metadata.set('grpc-status-details-bin', status);
    return { code, details: this.message, metadata };
  }
}

function any(name, message) {
  const value = definitions[`google.rpc.${name}`].serialize(message);
  return { type_url: `type.googleapis.com/google.rpc.${name}`, value };
}

function texts(values) {
  const short = ([key, value]) => [key, cut(String(value), VALUE_BYTES)];
  return Object.fromEntries(Object.entries(values).map(short));
}

/** The first `size` bytes of a text, in whole characters. */
function cut(text, size) {
  const bytes = Buffer.from(text.toWellFormed());
  if (bytes.length <= size) return bytes.toString();
  return bytes.toString('utf8', 0, size).replace(/\ufffd$/, '');
}

/** A field that is wrong, and what is allowed. */
const wrong = (field, description) => ({ field, description });

function badRequest(...fields) {
  const text = fields.map(({ field, description }) => `${field}: ${description}`).join('; ');
  return new Fault('BAD_REQUEST', text, { fields });
}

/** What is not built: the field's path, and what it has. */
function feature(field, value = '') {
  const text = `${[field, value].filter(Boolean).join(' ')} is not supported`;
  return new Fault('FEATURE', text, { metadata: { feature: field } });
}

function wrongState(text, state) {
  return new Fault('WRONG_STATE', text, { metadata: { state } });
}

function stageDeadline(stage) {
  const text = `the request's time ended while in stage '${stage}'`;
  return new Fault('STAGE_DEADLINE', text, { metadata: { stage } });
}

function mismatch(field, ours, theirs) {
  const text = `${field} differs: ${ours} here, ${theirs} there`;
  return new Fault('LAYOUT_MISMATCH', text, { metadata: { field, ours, theirs } });
}

module.exports = {
  Code, Fault, badRequest, feature, mismatch, speak, stageDeadline, wrong, wrongState,
};
