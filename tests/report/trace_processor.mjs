// Perfetto's trace processor, as Perfetto's page runs it: WebAssembly behind a worker that speaks TraceProcessorRpc
// (protos/perfetto/trace_processor/trace_processor.proto). `node trace_processor.mjs PAGE TRACE SQL...` prints a JSON list of
// strings for each query, which selects one column of text.
import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import vm from "node:vm";

const [page, trace, ...queries] = process.argv.slice(2);
const APPEND_TRACE_DATA = 1, FINALIZE_TRACE_DATA = 2, QUERY_STREAMING = 3;

function varint(n) {
  const out = [];
  for (; n > 127; n = Math.floor(n / 128)) out.push((n % 128) | 128);
  return Buffer.from([...out, n]);
}

const number = (field, n) => Buffer.concat([varint(field * 8), varint(n)]);
const bytes = (field, data) => Buffer.concat([varint(field * 8 + 2), varint(data.length), data]);

function* fields(message) {
  let at = 0;
  const next = () => {
    let n = 0, scale = 1, byte;
    do {
      byte = message[at++];
      n += (byte & 127) * scale;
      scale *= 128;
    } while (byte & 128);
    return n;
  };
  while (at < message.length) {
    const key = next(), kind = key & 7;
    let value = kind === 0 || kind === 2 ? next() : undefined;
    if (kind === 2) value = message.subarray(at, (at += value));
    else if (kind !== 0) at += kind === 1 ? 8 : 4;
    yield [Math.floor(key / 8), value];
  }
}

const all = (message, field) => [...fields(message)].filter(([f]) => f === field).map(([, value]) => value);

const replies = [];
const port = { postMessage: (data) => replies.push(Buffer.from(data)) };
const worker = {
  console: { log() {}, warn() {}, error: console.error },
  crypto, performance, setTimeout, TextDecoder, TextEncoder, URL,
  importScripts() {}, // with the next two, what tells a worker
  location: { href: "file:///engine_bundle.js" },
  WorkerGlobalScope: class {},
  XMLHttpRequest: class {
    status = 200;
    open(method, url) {
      this.response = new Uint8Array(readFileSync(join(page, basename(url)))).buffer;
    }
    send() {}
  },
};
worker.self = worker;
vm.createContext(worker);
vm.runInContext(readFileSync(join(page, "engine_bundle.js"), "utf8"), worker);
const Bytes = vm.runInContext("Uint8Array", worker);
worker.onmessage({ data: port });
await new Promise((resolve) => setTimeout(resolve));

let sequence = 0;
function call(method, ...argument) {
  const request = bytes(1, Buffer.concat([number(1, sequence++), number(2, method), ...argument]));
  port.onmessage({ data: new Bytes(request) });
  return replies.splice(0).flatMap((reply) => all(reply, 1));
}

function rows(sql) {
  const results = call(QUERY_STREAMING, bytes(103, bytes(1, Buffer.from(sql)))).flatMap((rpc) => all(rpc, 203));
  const errors = results.flatMap((result) => all(result, 2)).map(String);
  if (errors.length) throw new Error(errors.join("; "));
  const cells = results.flatMap((result) => all(result, 3)).flatMap((batch) => all(batch, 5));
  return cells.flatMap((joined) => joined.toString().split("\0").slice(0, -1));
}

call(APPEND_TRACE_DATA, bytes(101, readFileSync(trace)));
call(FINALIZE_TRACE_DATA);
console.log(JSON.stringify(queries.map(rows)));
process.exit(0);
