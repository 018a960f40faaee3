"""The console entry `inferd-engine`: what a front starts for each loaded model."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec
import zmq

from inferd.engine.build import build_engine
from inferd.engine.core.launch import StartFile
from inferd.engine.core.lines import FORMAT
from inferd.engine.core.parent import die_with_parent
from inferd.engine.core.proc import EngineCoreProc, OutputChannel
from inferd.engine.errors import EngineError
from inferd.engine.messages import EngineStartFailed

logger = logging.getLogger("inferd.engine")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="inferd-engine", description="One inference engine; started by inferd.")
    parser.add_argument("--start-file", type=Path, required=True, help="JSON written by the starting process")
    start = msgspec.json.decode(parser.parse_args(argv).start_file.read_bytes(), type=StartFile)
    die_with_parent(start.death_fd, start.parent_pid, kernel_signal=start.kernel_signal)
    os.umask(0o077)
    os.environ["HF_HUB_OFFLINE"] = "1"  # an engine reads its model folder and nothing else
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=FORMAT, stream=sys.stderr)
    logging.getLogger("inferd").setLevel(start.log_level)
    sys.exit(serve(start))


def serve(start: StartFile) -> int:
    """Loads, says hello, runs; returns the exit code."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    output = OutputChannel(context, Path(start.output_socket))
    core = None
    try:
        core, ready = build_engine(start.args)
    except Exception as error:
        logger.error("the engine cannot start: %s", error)
        code = error.code if isinstance(error, EngineError) else "internal"
        output.put(EngineStartFailed(str(error) or type(error).__name__, code, traceback.format_exc()))
        exit_code = 1
    else:
        logger.info(
            "ready after %.1f s: %s, a context of %d tokens, %d KV blocks of %d",
            *(ready.load_s, ready.dtype, ready.max_model_len, ready.num_blocks, ready.block_size),
        )
        for decision in ready.decisions:
            logger.debug("%s", decision)
        proc = EngineCoreProc(core, context, Path(start.input_socket), output, step_timeout_s=start.args.step_timeout_s)
        exit_code = proc.run(ready)
    output.close()  # the last words first: what comes now may fail after a fatal error
    if core is not None:
        core.shutdown()
    context.term()
    return exit_code


if __name__ == "__main__":
    main()
