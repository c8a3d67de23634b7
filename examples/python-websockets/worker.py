#!/usr/bin/env python3
"""A Faena worker over the WebSocket. Needs Python 3.9 and the package websockets.

    pip install websockets && python3 examples/python-websockets/worker.py
"""
import asyncio
import json
import os
import signal
import uuid

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

URL = os.environ.get("FAENA_URL", "http://127.0.0.1:3000").rstrip("/").replace("http", "ws", 1) + "/api/v1/workers/connect"
TOKEN = os.environ.get("FAENA_TOKEN")
CONCURRENCY = 8


class Failed(Exception):
    """Raise it from a handler. What else a handler raises is tried again."""

    def __init__(self, message, retryable=True, retry_after_ms=None):
        super().__init__(message)
        self.retryable, self.retry_after_ms = retryable, retry_after_ms


# ---------------------------------------------------------------- your part


async def greet(job, payload):
    if not payload.get("name"):
        raise Failed("the name is empty", retryable=False)
    await job.progress({"phase": "greeting", "percentage": 50})

    async def make_greeting():
        return "Hello, " + payload["name"]

    # A step that an earlier run has finished is not done again; its stored result is used.
    return {"greeting": await job.step("greeting", make_greeting)}


HANDLERS = {"greet": greet}

# ------------------------------------------------- the rest is for all handlers


class Refused(Exception):
    """The server did not take a report: the job has been given to another worker."""


class Job:
    """One run of one job."""

    def __init__(self, worker, data):
        self.worker, self.id, self.run = worker, data["id"], data["run"]
        self.type, self.payload = data["type"], data["payload"]
        self.steps = {step["name"]: step["result"] for step in data.get("steps", [])}
        self.cancelled = asyncio.Event()  # look at it in long work

    async def progress(self, progress):
        await self.worker.send({"type": "progress", "jobId": self.id, "run": self.run, "progress": progress})

    async def step(self, name, work):
        if name not in self.steps:
            result = await work()
            await self.report("step", name=name, result=result)
            self.steps[name] = result
        return self.steps[name]

    async def report(self, kind, **fields):
        """Returns when the server has acknowledged it, on this connection or a later one."""
        frame = {"type": kind, "jobId": self.id, "run": self.run, **fields}
        acknowledged = asyncio.get_running_loop().create_future()
        self.worker.reports.append((frame, acknowledged))
        await self.worker.send(frame)
        await acknowledged


class Worker:
    def __init__(self):
        # Kept over reconnects, so that running jobs stay ours. A pool of Faena's gives its processes a name.
        self.id = os.environ.get("FAENA_WORKER_ID") or str(uuid.uuid4())
        self.socket = None
        self.jobs, self.tasks, self.reports = {}, set(), []  # reports: sent and not acknowledged
        self.stopping = asyncio.Event()

    async def send(self, frame):
        """Without a connection nothing is sent; reports are repeated on the next one."""
        if self.socket:
            try:
                await self.socket.send(json.dumps(frame))
            except ConnectionClosed:
                pass

    async def work(self):
        headers = {"authorization": "Bearer " + TOKEN} if TOKEN else None
        # `async for` connects again, with growing delays, whenever the connection is lost.
        async for socket in connect(URL, additional_headers=headers, max_size=2**24):
            try:
                await self.converse(socket)
            except ConnectionClosed:
                pass
            finally:
                self.socket = None
            if self.stopping.is_set() and not self.jobs:
                return

    async def converse(self, socket):
        in_flight = [{"jobId": job.id, "run": job.run} for job in self.jobs.values()]
        register = {"type": "register", "workerId": self.id, "name": "python-websockets", "token": TOKEN, "inFlight": in_flight,
                    "capabilities": list(HANDLERS), "concurrency": CONCURRENCY}
        await socket.send(json.dumps({key: value for key, value in register.items() if value is not None}))
        registered = json.loads(await socket.recv())
        if registered["type"] != "registered":
            raise SystemExit(f"refused: {registered}")
        print("registered as", self.id, flush=True)
        self.socket = socket
        if not registered.get("resumed"):
            for job in self.jobs.values():  # away for too long: others have them now
                job.cancelled.set()
        for frame, _ in list(self.reports):
            await self.send(frame)
        helpers = [asyncio.create_task(self.beat(registered["heartbeatIntervalMs"] / 1000)), asyncio.create_task(self.drain())]
        try:
            async for text in socket:
                self.hear(json.loads(text))
        finally:
            for helper in helpers:
                helper.cancel()

    def hear(self, frame):
        kind = frame["type"]
        if kind == "job":
            job = Job(self, frame["job"])
            self.jobs[job.id] = job
            task = asyncio.create_task(self.do(job))
            self.tasks.add(task)  # the event loop itself keeps no hold of a task
            task.add_done_callback(self.tasks.discard)
        elif kind == "ack":
            self.settle(frame)
        elif kind == "cancel" and frame["jobId"] in self.jobs:
            self.jobs[frame["jobId"]].cancelled.set()
        elif kind == "drain":
            self.stopping.set()
        elif kind == "error":
            print("error:", frame["error"], flush=True)

    def settle(self, ack):
        for entry in self.reports:
            frame, acknowledged = entry
            if frame["jobId"] == ack["jobId"] and frame["type"] == ack.get("of") and frame["run"] == ack.get("run", frame["run"]):
                self.reports.remove(entry)
                if not acknowledged.done():
                    if ack.get("ok"):
                        acknowledged.set_result(None)
                    else:
                        acknowledged.set_exception(Refused(ack.get("error")))
                return

    async def do(self, job):
        try:
            result = await HANDLERS[job.type](job, job.payload)
            await job.report("complete", result=result)
        except Refused as refused:
            print(job.id, refused, flush=True)
        except Exception as error:
            fields = {"error": str(error) or repr(error), "retryable": getattr(error, "retryable", True)}
            if getattr(error, "retry_after_ms", None):
                fields["retryAfterMs"] = error.retry_after_ms
            try:
                await job.report("fail", **fields)
            except Refused as refused:
                print(job.id, refused, flush=True)
        finally:
            if self.jobs.get(job.id) is job:
                del self.jobs[job.id]

    async def beat(self, interval):
        while True:
            await asyncio.sleep(interval)
            await self.send({"type": "heartbeat"})

    async def drain(self):
        """When told to stop: no new jobs, finish those that run, leave."""
        await self.stopping.wait()
        await self.send({"type": "drain"})
        while self.jobs:
            await asyncio.wait(list(self.tasks))
        await self.send({"type": "leave"})
        print("left", flush=True)
        await self.socket.close()


async def main():
    worker = Worker()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, worker.stopping.set)
    working = asyncio.create_task(worker.work())
    stopping = asyncio.create_task(worker.stopping.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    if worker.socket or worker.jobs or working.done():
        await working
    # Otherwise there is no server to leave; asyncio.run ends the tries to connect.


if __name__ == "__main__":
    asyncio.run(main())
