// @ts-check
// A Faena worker for Node 18 or newer, without packages. Uses the WebSocket of Node 22 and newer, otherwise plain HTTP.
//
//     node examples/node/worker.mjs

import { randomUUID } from "node:crypto";

/** @typedef {{id: string, type: string, run: number, payload: any, steps: {name: string, result: any}[]}} JobData */
/** @typedef {(kind: string, fields: object) => Promise<any>} Report */
/**
 * A job, as its handler sees it.
 * @typedef {JobData & {
 *   cancelled: AbortSignal,
 *   progress: (progress: object) => Promise<any>,
 *   log: (message: string, event?: string) => Promise<any>,
 *   step: (name: string, work: () => Promise<any>) => Promise<any>,
 * }} Job
 */
/** @typedef {{frame: any, resolve: (value?: any) => void, reject: (error: Error) => void}} PendingReport */

const BASE = (process.env.FAENA_URL ?? "http://127.0.0.1:3000").replace(/\/$/, "") + "/api/v1/workers";
const TOKEN = process.env.FAENA_TOKEN;
const CONCURRENCY = 8;

/** An error with which a handler controls retries. Any other error that a handler throws is retried. */
class Failed extends Error {
  /**
   * @param {string} message
   * @param {{retryable?: boolean, retryAfterMs?: number}} options
   */
  constructor(message, { retryable = true, retryAfterMs } = {}) {
    super(message);
    this.retryable = retryable;
    this.retryAfterMs = retryAfterMs;
  }
}

// ------------------------------------------------------------- your handlers

/**
 * @param {Job} job
 * @param {any} payload
 */
async function greet(job, payload) {
  if (!payload.name) throw new Failed("the name is empty", { retryable: false });
  await job.progress({ phase: "greeting", percentage: 50 });
  // A step that an earlier run has completed does not run again; its stored result is used.
  const greeting = await job.step("greeting", async () => `Hello, ${payload.name}`);
  // Long work ends early if the job was cancelled.
  for (let left = (payload.seconds ?? 0) * 1000; left > 0 && !job.cancelled.aborted; left -= 50) await sleep(50);
  return { greeting };
}

/** @type {Record<string, (job: Job, payload: any) => Promise<any>>} */
const handlers = { greet };

// --------------------------------------------------- the same for all handlers

/** The server rejected a report: the job has been assigned to another worker, or the server does not know this worker. */
class Rejected extends Error {
  /**
   * @param {number} status
   * @param {{code?: string, message?: string} | undefined} error
   */
  constructor(status, error) {
    super(`${error?.message} (${error?.code})`);
    this.status = status;
  }
}

/** @param {number} ms */
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** @param {unknown} error */
const text = (error) => (error instanceof Error ? error.message : String(error));

const worker = {
  // The id stays the same after a reconnect, so that running jobs stay with this worker. A worker pool sets it for its processes.
  id: process.env.FAENA_WORKER_ID ?? randomUUID(),
  /** Proves to the server that this is the worker that registered. @type {string | undefined} */
  sessionToken: process.env.FAENA_SESSION_TOKEN,
  /** @type {Map<string, {run: number, stop: AbortController}>} */
  jobs: new Map(),
  stopping: false, // this worker shuts down
  draining: false, // the server sends no more jobs; it may resume
  stop() {}, // set by the transport: called on a shutdown
  idle() {}, // set by the transport: called when a job has finished
};

const isLeaving = () => worker.stopping || worker.draining;

for (const name of ["SIGTERM", "SIGINT"]) {
  process.on(name, () => {
    worker.stopping = true;
    worker.stop();
  });
}

const registration = () => ({
  workerId: worker.id,
  sessionToken: worker.sessionToken,
  name: "node",
  capabilities: Object.keys(handlers),
  concurrency: CONCURRENCY,
});

/**
 * Runs one job. `report(kind, fields)` returns when the server has acknowledged it; `update` does not wait for that.
 * @param {JobData} data
 * @param {Report} report
 * @param {Report} update
 */
async function run(data, report, update) {
  const steps = new Map(data.steps.map((step) => [step.name, step.result]));
  const stop = new AbortController();
  worker.jobs.set(data.id, { run: data.run, stop });
  /** @type {Job} */
  const job = {
    ...data,
    cancelled: stop.signal, // pass it to fetch
    progress: (progress) => update("progress", { progress }),
    log: (message, event) => update("log", { message, event }), // event: a name of your own, such as "training_started"
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
    if (error instanceof Rejected) console.log(data.id, error.message);
    else {
      const { retryable, retryAfterMs } = error instanceof Failed ? error : new Failed("");
      await report("fail", { error: text(error), retryable, retryAfterMs }).catch((rejected) => console.log(data.id, text(rejected)));
    }
  } finally {
    if (worker.jobs.get(data.id)?.run === data.run) worker.jobs.delete(data.id);
    worker.idle();
  }
}

/** @param {{jobId: string, reason?: string}} cancel */
const cancel = ({ jobId, reason }) => worker.jobs.get(jobId)?.stop.abort(reason);

// ------------------------------------------------------------ over the WebSocket

/** Reports that are not acknowledged yet. They are sent again over the next connection. @type {Set<PendingReport>} */
const reports = new Set();

/** The current connection. @type {{send: (frame: object) => void}} */
let connection = { send() {} };

/** Keeps a connection until the worker has left. Survives restarts of the server: the worker keeps its id and its jobs. */
async function overWebSocket() {
  for (let delay = 100; !(isLeaving() && worker.jobs.size === 0); delay = Math.min(delay * 2, 5000)) {
    const registered = await new Promise(connect);
    if (registered) delay = 100;
    if (!isLeaving() || worker.jobs.size > 0) await sleep(delay * (0.5 + Math.random() / 2));
  }
}

/** @param {(registered: boolean) => void} closed */
function connect(closed) {
  const socket = new WebSocket(BASE.replace(/^http/, "ws") + "/connect");
  /** @param {object} frame */
  const send = (frame) => {
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(frame));
  };
  /** @type {ReturnType<typeof setInterval> | undefined} */
  let heartbeat;
  let registered = false;
  const leave = () => {
    if (!isLeaving() || worker.jobs.size > 0) return;
    send({ type: "leave" });
    socket.close();
  };
  worker.stop = () => {
    if (registered) send({ type: "drain" });
    leave();
  };
  worker.idle = leave;
  connection = { send: (frame) => registered && send(frame) };

  socket.onopen = () => {
    // A job whose end is not acknowledged yet still counts as in flight.
    const inFlight = [...worker.jobs].map(([jobId, { run }]) => ({ jobId, run }));
    send({ type: "register", ...registration(), token: TOKEN, inFlight });
  };
  socket.onclose = () => {
    clearInterval(heartbeat);
    closed(registered);
  };
  socket.onerror = () => {
    console.log("not connected");
    closed(registered); // before Node 22 a failed attempt to connect has no close event
  };
  socket.onmessage = ({ data }) => {
    const frame = JSON.parse(data);
    switch (frame.type) {
      case "registered":
        console.log("registered as", worker.id);
        registered = true;
        worker.sessionToken = frame.sessionToken;
        heartbeat = setInterval(() => send({ type: "heartbeat" }), frame.heartbeatIntervalMs);
        if (!frame.resumed) for (const job of worker.jobs.values()) job.stop.abort("assigned to another worker");
        for (const report of reports) send(report.frame);
        if (worker.stopping) worker.stop();
        break;
      case "job":
        startJob(frame.job);
        break;
      case "ack":
        acknowledge(frame);
        break;
      case "cancel":
        cancel(frame);
        break;
      case "drain":
        worker.draining = true;
        leave();
        break;
      case "resume": // the drain was cancelled: the server sends jobs again
        worker.draining = false;
        break;
      case "error":
        console.log("error:", frame.error);
        if (!registered) socket.close(); // for example UNAVAILABLE, while the server stops: connects again after a delay
    }
  };
}

/** @param {JobData} data */
function startJob(data) {
  const about = { jobId: data.id, run: data.run };
  /** @type {Report} */
  const report = (type, fields) =>
    new Promise((resolve, reject) => {
      const pending = { frame: { type, ...about, ...fields }, resolve, reject };
      reports.add(pending);
      connection.send(pending.frame);
    });
  run(data, report, async (type, fields) => connection.send({ type, ...about, ...fields }));
}

/** @param {any} ack */
function acknowledge(ack) {
  for (const report of reports) {
    const { frame } = report;
    if (frame.jobId !== ack.jobId || frame.type !== ack.of || frame.run !== (ack.run ?? frame.run)) continue;
    reports.delete(report);
    if (ack.ok) report.resolve();
    else report.reject(new Rejected(409, ack.error));
    return;
  }
}

// ------------------------------------------------------------------ over plain HTTP

/**
 * @param {string} method
 * @param {string} path
 * @param {object} [body]
 * @param {AbortSignal} [signal]
 */
async function call(method, path, body, signal = AbortSignal.timeout(30_000)) {
  /** @type {Record<string, string>} */
  const headers = { "content-type": "application/json" };
  if (TOKEN) headers.authorization = `Bearer ${TOKEN}`;
  if (worker.sessionToken) headers["x-session-token"] = worker.sessionToken;
  const answer = await fetch(BASE + path, { method, headers, body: body && JSON.stringify(body), signal });
  const data = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Rejected(answer.status, data.error);
  return data;
}

/**
 * Sends a report until it is answered. The server counts a repeated report once.
 * @param {JobData} job
 * @param {string} kind
 * @param {object} fields
 */
async function reportByHttp({ id, run }, kind, fields) {
  for (;;) {
    try {
      return await call("POST", `/${worker.id}/jobs/${id}/${kind}`, { run, ...fields });
    } catch (error) {
      if (error instanceof Rejected && error.status < 500) throw error;
      await sleep(1000);
    }
  }
}

async function overHttp() {
  const waiting = new AbortController();
  worker.stop = () => waiting.abort();
  let free = () => {};
  worker.idle = () => free();
  /** @param {{cancel: {jobId: string}[], drain: boolean}} answer */
  const handle = (answer) => {
    answer.cancel.forEach(cancel);
    worker.draining = answer.drain;
  };
  /** @type {ReturnType<typeof setInterval> | undefined} */
  let heartbeat;
  const register = async () => {
    const answer = await call("POST", "/register", registration());
    console.log("registered as", worker.id);
    worker.sessionToken = answer.sessionToken;
    clearInterval(heartbeat);
    heartbeat = setInterval(() => call("POST", `/${worker.id}/heartbeat`, {}).then(handle, () => {}), answer.heartbeatIntervalMs);
  };
  while (!isLeaving()) {
    try {
      if (!heartbeat) await register();
      const max = CONCURRENCY - worker.jobs.size;
      if (max === 0) {
        await new Promise((/** @type {(value?: any) => void} */ resolve) => (free = resolve));
        continue;
      }
      const limit = AbortSignal.timeout(30_000);
      const answer = await call("POST", `/${worker.id}/claim`, { max, waitMs: 20_000 }, either(waiting.signal, limit));
      handle(answer);
      for (const data of answer.jobs) {
        /** @type {Report} */
        const report = (kind, fields) => reportByHttp(data, kind, fields);
        run(data, report, report);
      }
    } catch (error) {
      if (worker.stopping) break;
      if (error instanceof Rejected && error.status === 404) {
        // The server has declared this worker lost: the session is over, and the worker registers again.
        clearInterval(heartbeat);
        heartbeat = worker.sessionToken = undefined;
      } else {
        console.log("no answer:", text(error));
        await sleep(1000);
      }
    }
  }
  while (worker.jobs.size > 0) await new Promise((/** @type {(value?: any) => void} */ resolve) => (free = resolve));
  clearInterval(heartbeat);
  await call("DELETE", `/${worker.id}`).catch(() => {});
}

/**
 * Combines signals, as AbortSignal.any does, which Node 18 lacks.
 * @param {AbortSignal[]} signals
 */
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
