"""The quickstart notebook runs from top to bottom; the stop button leaves a checkpoint and no process."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.harness import TIMEOUT_S, elasticrec, write_job

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "examples/quickstart.ipynb"

# Starts a kernel as Jupyter does, runs a cell that trains, interrupts it, and lists the processes that are left.
INTERRUPT = """
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
client.execute("import elasticrec; elasticrec.train('job.yaml')", stop_on_error=False)
while True:
    message = client.get_iopub_msg(timeout=120)
    if "epoch" in message["content"].get("text", ""):
        break
    assert message["msg_type"] != "error", message["content"]
manager.interrupt_kernel()
while True:
    message = client.get_iopub_msg(timeout=120)
    if message["msg_type"] == "error":
        print(message["content"]["ename"])
        break
client.execute("from pathlib import Path\\n"
               "tasks = [(task / 'children').read_text().split() for task in Path('/proc/self/task').iterdir()]\\n"
               "print('CHILDREN', sum(tasks, []))")
while True:
    message = client.get_iopub_msg(timeout=120)
    if "CHILDREN" in message["content"].get("text", ""):
        print(message["content"]["text"].strip())
        break
    assert message["msg_type"] != "error", message["content"]
manager.shutdown_kernel()
client.stop_channels()
"""


def test_the_quickstart_runs(tmp_path: Path) -> None:
    command = [Path(sys.executable).parent / "jupyter", "execute", NOTEBOOK, f"--output={tmp_path / 'out.ipynb'}"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    text = "".join("".join(output.get("text", [])) for output in outputs)
    assert "unknown key, did you mean `epochs`?" in text
    assert "finished: False" in text and "finished: True" in text
    assert "version 1 of demo: " in text and "serving demo version 1 " in text
    assert any("eval_click_auc" in "".join(output.get("data", {}).get("text/html", [])) for output in outputs)


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_the_stop_button_leaves_a_checkpoint_and_no_process(tmp_path: Path) -> None:
    write_job(tmp_path, format="slots", kind="dnn", train__epochs=100_000, train__print_every_s=0.05, train__threads=1)
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["KeyboardInterrupt", "CHILDREN []"]
    checkpoints = sorted((tmp_path / "runs/tiny/checkpoints").glob("step-*/manifest.json"))
    assert checkpoints and checkpoints[-1].stat().st_mtime >= started
    steps = json.loads(checkpoints[-1].read_bytes())["steps"]
    assert steps > 0
    # The run is unlocked and complete.
    result = elasticrec("train", "job.yaml", "--set", "train.epochs=1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "is finished" in result.stderr or "resuming runs/tiny" in result.stderr
