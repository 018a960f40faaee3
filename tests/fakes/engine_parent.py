"""A process that starts an engine, prints its pid, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from inferd.engine.config import EngineArgs
from inferd.engine.core.client import MPClient
from inferd.engine.frontend.async_llm import AsyncLLM


async def serve(args: EngineArgs, run_dir: Path) -> None:
    llm = await AsyncLLM.start(args, run_dir)
    print(llm.ready.pid, flush=True)
    await llm.wait_dead()


def serve_in_a_thread(args: EngineArgs, run_dir: Path) -> None:
    """Then only the death pipe tells the engine, since the kernel's signal follows the main thread."""

    def start() -> None:
        client = MPClient(args, run_dir)
        print(client.ready.pid, flush=True)
        client.get_outputs()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()


if __name__ == "__main__":
    how, model, folder = sys.argv[1:]
    engine_args = EngineArgs(model=model, executor="scripted", device="cpu")
    if how == "thread":
        serve_in_a_thread(engine_args, Path(folder))
    else:
        asyncio.run(serve(engine_args, Path(folder)))
