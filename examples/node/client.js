'use strict';
// Streams the text of an answer from the router: node client.js HOST:PORT "prompt" [SECONDS]

const grpc = require('@grpc/grpc-js');
const { errorInfo, loadProtos } = require('./protos');

const [endpoint, text, seconds = '60'] = process.argv.slice(2);
if (!text || !(seconds > 0)) {
  console.error('usage: node client.js HOST:PORT "prompt" [SECONDS]');
  process.exit(2);
}

const { definitions, services } = loadProtos();
const router = new services.InferenceService(endpoint, grpc.credentials.createInsecure());
const answer = router.Generate(
  { text, sampling: { max_tokens: 32, temperature: 0 } },
  { deadline: Date.now() + seconds * 1000 },
);
answer.on('data', (part) => process.stdout.write(part.text));
answer.on('error', (error) => {
  const [details] = error.metadata.get('grpc-status-details-bin');
  const status = details && definitions['google.rpc.Status'].deserialize(details);
  const reason = (status && errorInfo(definitions, status)?.reason) ?? 'of the transport';
  console.error(`${grpc.status[error.code]} ${reason}: ${error.details}`);
  process.exitCode = 1;
});
answer.on('status', ({ code }) => {
  if (code === grpc.status.OK) process.stdout.write('\n');
  router.close();
});
