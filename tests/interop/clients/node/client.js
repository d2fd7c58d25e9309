// The steps of this program are in ../script.py.
import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import amqplib from 'amqplib';

const FIRST = 50;
const SECOND = 5;
const PATIENCE = 60_000;

const { version } = JSON.parse(readFileSync(new URL('node_modules/amqplib/package.json', import.meta.url)));
const report = { version, confirmed: 0, received: [], blocked: [], flow: null, request: '', lost: null };

const connection = await amqplib.connect(process.argv[2]);
connection.on('blocked', () => report.blocked.push(true));
connection.on('unblocked', () => report.blocked.push(false));
connection.on('error', (error) => { report.lost = error.message; });
const ended = new Promise((resolve) => { connection.on('close', resolve); });
const first = await connection.createConfirmChannel();
const other = await connection.createChannel();
first.on('error', () => {});
other.on('error', () => {});
await first.assertQueue('orders', { durable: false });

async function publish(start, stop) {
  for (let number = start; number < stop; number += 1) {
    const body = Buffer.from(String(number).padStart(6, '0'));
    await new Promise((resolve, reject) => {
      first.sendToQueue('orders', body, { messageId: String(number), mandatory: true }, (error) => {
        if (error) reject(error); else resolve();
      });
    });
    report.confirmed += 1;
  }
}

async function consume(count) {
  const stop = report.received.length + count;
  let enough;
  const all = new Promise((resolve) => { enough = resolve; });
  const { consumerTag } = await other.consume('orders', (message) => {
    report.received.push([message.content.toString(), message.properties.messageId]);
    other.ack(message);
    if (report.received.length === stop) enough();
  });
  await all;
  await other.cancel(consumerTag);
}

function tell(words) {
  other.sendToQueue('told', Buffer.from(words));
}

async function awaitGo() {
  const end = Date.now() + PATIENCE;
  while (!await other.get('go', { noAck: true })) {
    if (Date.now() > end) throw new Error('nobody said to go on');
    await sleep(10);
  }
}

try {
  await publish(0, FIRST);
  await consume(FIRST);
  for (const words of ['published', 'blocked', 'unblocked']) {
    tell(words);
    await awaitGo();
  }
  await publish(FIRST, FIRST + SECOND);
  tell('went on');
  await awaitGo();
  await consume(SECOND);
  try {
    await first.checkQueue('orders');
    report.request = 'ok';
  } catch (error) {
    report.request = error.constructor.name;
  }
  await connection.close();
} catch (error) {
  // If the connection has ended, the report contains the reason. Any other error is a fault of this program.
  await ended;
  if (!report.lost) throw error;
}
console.log(JSON.stringify(report));
