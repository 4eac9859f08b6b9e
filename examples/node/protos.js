'use strict';
// The protocol's definitions, read from the .proto files at start.

const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const OURS = path.join(__dirname, '../../protos');
// Where google/rpc/*.proto are; `make venv` lays them there.
const GOOGLEAPIS = path.join(__dirname, '../../.venv/googleapis');

const NAMES = ['admin', 'decode', 'inference', 'transfer'];
const FILES = NAMES.map((name) => `pd_grpc/v1/${name}.proto`);

/** Every message by its full name, and `services` of the package pd_grpc.v1. */
function loadProtos(include = GOOGLEAPIS) {
  // Enums stay numbers, so that a value of a later version is seen as it came; 64 bits as text.
  const definitions = protoLoader.loadSync([...FILES, 'google/rpc/error_details.proto'], {
    keepCase: true,
    longs: String,
    defaults: true,
    oneofs: true,
    includeDirs: [OURS, include],
  });
  return { definitions, services: grpc.loadPackageDefinition(definitions).pd_grpc.v1 };
}

/** `ErrorInfo {reason, metadata}` among the details of a google.rpc.Status; undefined without. */
function errorInfo(definitions, status) {
  const found = status.details.find((any) => any.type_url.endsWith('/google.rpc.ErrorInfo'));
  try {
    const info = found && definitions['google.rpc.ErrorInfo'].deserialize(found.value);
    return info?.domain === 'pd_grpc' ? info : undefined;
  } catch {
    return undefined; // what cannot be parsed is as good as none
  }
}

module.exports = { GOOGLEAPIS, errorInfo, loadProtos };
