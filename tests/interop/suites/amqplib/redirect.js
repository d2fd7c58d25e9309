// The suite connects to localhost:5672 wherever it names no broker. This sends it to BROKER_PORT.
'use strict';
const net = require('node:net');

for (const name of ['connect', 'createConnection']) {
  const original = net[name];
  net[name] = (...args) => {
    const options = typeof args[0] === 'object' ? args[0] : { port: args[0], host: args[1] };
    if (Number(options.port) !== 5672) return original(...args);
    const callback = args.find((each) => typeof each === 'function');
    return original({ ...options, port: Number(process.env.BROKER_PORT), host: '127.0.0.1' }, callback);
  };
}
