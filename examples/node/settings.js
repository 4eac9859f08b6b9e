'use strict';
// The command line: --lease-ms is settings.leaseMs, and so on.

const { parseArgs } = require('node:util');
const { GOOGLEAPIS } = require('./protos');

const NORMAL = {
  name: '', host: '127.0.0.1', port: 0, bulkPort: 0, include: GOOGLEAPIS,
  blockSize: 16, numBlocks: 256, maxModelLen: 1 << 20,
  vocab: 32000, layers: 4, heads: 2, headDim: 8,
  leaseMs: 15000, graceMs: 1000, heartbeatMs: 5000, kvProgressMs: 10000, firstTokenMs: 30000,
  attachMs: 10000, tombstoneMs: 60000, budgetMs: 300000, drainMs: 30000,
  windowBytes: 8 << 20, allocateQueue: 1024,
};
// The least and the greatest of those that are not any whole number.
const BOUNDS = {
  port: [0, 65535], bulkPort: [0, 65535], blockSize: [1, 1024], numBlocks: [1, 1 << 24],
  maxModelLen: [2, 1 << 20], vocab: [260, 2 ** 32], layers: [1, 1024], heads: [1, 1024],
  headDim: [1, 1024], leaseMs: [1, 1e9], heartbeatMs: [1, 1e9], kvProgressMs: [1, 1e9],
};

/** Every setting. RangeError or TypeError names the flag that is wrong. */
function readSettings() {
  const flag = (name) => name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
  const flags = Object.keys(NORMAL).map((name) => [flag(name), { type: 'string' }]);
  const { values } = parseArgs({ options: Object.fromEntries(flags) });
  const settings = { ...NORMAL };
  for (const [name, normal] of Object.entries(NORMAL)) {
    const given = values[flag(name)], [least, most] = BOUNDS[name] ?? [0, 1e9];
    if (given === undefined) continue;
    settings[name] = typeof normal === 'number' ? Number(given) : given;
    if (typeof normal !== 'number') continue;
    if (!/^\d+$/.test(given) || settings[name] < least || settings[name] > most) {
      throw new RangeError(`--${flag(name)}: must be between ${least} and ${most}, not ${given}`);
    }
  }
  if (settings.heads * settings.headDim < 16) {
    throw new RangeError('--head-dim: heads times head-dim must be at least 16');
  }
  return settings;
}

module.exports = { readSettings };
