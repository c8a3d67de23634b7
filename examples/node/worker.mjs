// A Faena worker for Node 18 or newer, without packages. Uses the WebSocket of Node 22 and newer, otherwise plain HTTP.
//
//     node examples/node/worker.mjs

import { randomUUID } from "node:crypto";

const URL = (process.env.FAENA_URL ?? "http://127.0.0.1:3000").replace(/\/$/, "") + "/api/v1/workers";
const TOKEN = process.env.FAENA_TOKEN;
const CONCURRENCY = 8;

/** The error of a handler. Any other error that a handler throws is retried. */
class Failed extends Error {
  constructor(message, { retryable = true, retryAfterMs } = {}) {
    super(message);
    Object.assign(this, { retryable, retryAfterMs });
  }
}

// ------------------------------------------------------------- your handlers

async function greet(job, payload) {
  if (!payload.name) throw new Failed("the name is empty", { retryable: false });
  await job.progress({ phase: "greeting", percentage: 50 });
  // A step that an earlier run has completed does not run again; its stored result is used.
  const greeting = await job.step("greeting", async () => `Hello, ${payload.name}`);
  return { greeting };
}

const handlers = { greet };

// --------------------------------------------------- the same for all handlers

/** The server refused a report: the job has been assigned to another worker, or the server does not know this worker. */
class Refused extends Error {
  constructor(status, error) {
    super(`${error?.message} (${error?.code})`);
    this.status = status;
  }
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const worker = {
  // The same after a reconnect, so that running jobs stay with this worker. A worker pool sets it for its processes.
  id: process.env.FAENA_WORKER_ID ?? randomUUID(),
  jobs: new Map(),
  stopping: false,
  stop() {}, // set by the transport: called on a shutdown
  idle() {}, // set by the transport: called when a job has finished
};

for (const name of ["SIGTERM", "SIGINT"]) {
  process.on(name, () => {
    worker.stopping = true;
    worker.stop();
  });
}

const registration = () => ({
  workerId: worker.id,
  name: "node",
  capabilities: Object.keys(handlers),
  concurrency: CONCURRENCY,
});

/** Runs one job. `report(kind, fields)` returns when the server has acknowledged it; `update` does not wait for that. */
async function run(data, report, update) {
  const steps = new Map(data.steps.map((step) => [step.name, step.result]));
  const stop = new AbortController();
  worker.jobs.set(data.id, { run: data.run, stop });
  const job = {
    ...data,
    cancelled: stop.signal, // pass it to fetch
    progress: (progress) => update("progress", { progress }),
    log: (message) => update("log", { message }),
    async step(name, work) {
      if (!steps.has(name)) {
        const result = await work();
        await report("step", { name, result });
        steps.set(name, result);
      }
      return steps.get(name);
    },
  };
  try {
    const result = await handlers[data.type](job, data.payload);
    await report("complete", { result });
  } catch (error) {
    if (error instanceof Refused) console.log(data.id, error.message);
    else {
      const { message, retryable = true, retryAfterMs } = error;
      await report("fail", { error: message, retryable, retryAfterMs }).catch((refused) => console.log(data.id, refused.message));
    }
  } finally {
    if (worker.jobs.get(data.id)?.run === data.run) worker.jobs.delete(data.id);
    worker.idle();
  }
}

const cancel = ({ jobId, reason }) => worker.jobs.get(jobId)?.stop.abort(reason);

// ------------------------------------------------------------ over the WebSocket

async function overWebSocket() {
  const reports = new Set(); // not acknowledged yet; sent again over the next connection
  for (let delay = 100; !(worker.stopping && worker.jobs.size === 0); delay = Math.min(delay * 2, 5000)) {
    const registered = await new Promise((closed) => connect(reports, closed));
    if (registered) delay = 100;
    if (!worker.stopping) await sleep(delay * (0.5 + Math.random() / 2));
  }
}

function connect(reports, closed) {
  const socket = new WebSocket(URL.replace(/^http/, "ws") + "/connect");
  const send = (frame) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(frame));
  let heartbeat;
  let registered = false;
  const drain = () => registered && send({ type: "drain" });
  const leave = () => {
    if (!worker.stopping || worker.jobs.size > 0) return;
    send({ type: "leave" });
    socket.close();
  };
  worker.stop = () => (drain(), leave());
  worker.idle = leave;
  worker.update = (about) => async (type, fields) => send({ type, ...about, ...fields });
  worker.report = (about) => (type, fields) =>
    new Promise((resolve, reject) => {
      const report = { frame: { type, ...about, ...fields }, resolve, reject };
      reports.add(report);
      worker.send(report.frame);
    });
  worker.send = (frame) => registered && send(frame);

  socket.onopen = () => {
    const inFlight = [...worker.jobs].map(([jobId, { run }]) => ({ jobId, run }));
    send({ type: "register", ...registration(), token: TOKEN, inFlight });
  };
  socket.onclose = () => {
    clearInterval(heartbeat);
    closed(registered);
  };
  socket.onerror = () => console.log("not connected");
  socket.onmessage = ({ data }) => {
    const frame = JSON.parse(data);
    switch (frame.type) {
      case "registered":
        console.log("registered as", worker.id);
        registered = true;
        heartbeat = setInterval(() => send({ type: "heartbeat" }), frame.heartbeatIntervalMs);
        if (!frame.resumed) for (const job of worker.jobs.values()) job.stop.abort("assigned to another worker");
        for (const report of reports) send(report.frame);
        if (worker.stopping) worker.stop();
        break;
      case "job": {
        const about = { jobId: frame.job.id, run: frame.job.run };
        // Looked up at each call, because the connection may have been replaced by then.
        run(frame.job, (...a) => worker.report(about)(...a), (...a) => worker.update(about)(...a));
        break;
      }
      case "ack": {
        const matches = ({ frame: sent }) => sent.jobId === frame.jobId && sent.type === frame.of && sent.run === (frame.run ?? sent.run);
        const report = [...reports].find(matches);
        if (!report) break;
        reports.delete(report);
        if (frame.ok) report.resolve();
        else report.reject(new Refused(409, frame.error));
        break;
      }
      case "cancel":
        cancel(frame);
        break;
      case "drain":
        worker.stopping = true;
        leave();
        break;
      case "error":
        console.log("error:", frame.error);
        if (!registered) socket.close();
    }
  };
}

// ------------------------------------------------------------------ over plain HTTP

async function call(method, path, body, signal = AbortSignal.timeout(30_000)) {
  const headers = { "content-type": "application/json", ...(TOKEN && { authorization: `Bearer ${TOKEN}` }) };
  const answer = await fetch(URL + path, { method, headers, body: body && JSON.stringify(body), signal });
  const data = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, data.error);
  return data;
}

/** Sends a report until it is answered. The server counts a repeated report once. */
async function reportByHttp({ id, run }, kind, fields) {
  for (;;) {
    try {
      return await call("POST", `/${worker.id}/jobs/${id}/${kind}`, { run, ...fields });
    } catch (error) {
      if (error instanceof Refused && error.status < 500) throw error;
      await sleep(1000);
    }
  }
}

async function overHttp() {
  const waiting = new AbortController();
  worker.stop = () => waiting.abort();
  let free = () => {};
  worker.idle = () => free();
  const handle = (answer) => {
    answer.cancel.forEach(cancel);
    if (answer.drain) worker.stopping = true;
  };
  let heartbeat;
  const register = async () => {
    const { heartbeatIntervalMs } = await call("POST", "/register", registration());
    console.log("registered as", worker.id);
    clearInterval(heartbeat);
    heartbeat = setInterval(() => call("POST", `/${worker.id}/heartbeat`, {}).then(handle, () => {}), heartbeatIntervalMs);
  };
  while (!worker.stopping) {
    try {
      if (!heartbeat) await register();
      const max = CONCURRENCY - worker.jobs.size;
      if (max === 0) {
        await new Promise((resolve) => (free = resolve));
        continue;
      }
      const limit = AbortSignal.timeout(30_000);
      const answer = await call("POST", `/${worker.id}/claim`, { max, waitMs: 20_000 }, either(waiting.signal, limit));
      handle(answer);
      for (const data of answer.jobs) {
        const report = (kind, fields) => reportByHttp(data, kind, fields);
        run(data, report, report);
      }
    } catch (error) {
      if (worker.stopping) break;
      if (error instanceof Refused && error.status === 404) heartbeat = clearInterval(heartbeat); // declared lost: register again
      else {
        console.log("no answer:", error.message);
        await sleep(2000);
      }
    }
  }
  while (worker.jobs.size > 0) await new Promise((resolve) => (free = resolve));
  clearInterval(heartbeat);
  await call("DELETE", `/${worker.id}`).catch(() => {});
}

/** Combines signals, as AbortSignal.any does, which Node 18 lacks. */
function either(...signals) {
  const both = new AbortController();
  for (const signal of signals) {
    if (signal.aborted) both.abort();
    signal.addEventListener("abort", () => both.abort(), { once: true });
  }
  return both.signal;
}

await (typeof WebSocket === "undefined" ? overHttp() : overWebSocket());
console.log("left");
