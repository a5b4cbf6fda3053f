import os
import subprocess
import sys
from pathlib import Path

from common import FUNCTION, KEY, MODE, MODEL, TEXT, URL

home = Path(os.environ["HOME"], "llm")
home.mkdir(exist_ok=True)
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  supports_tools: true\n"
)
words = [str(Path(sys.executable).with_name("llm")), TEXT, "--model", "local", "--key", KEY]
if MODE != "stream":
    words.append("--no-stream")
if MODE == "edit":
    code = (Path(__file__).parent / "common.py").read_text()
    start = code.index(f"def {FUNCTION['name']}(")
    body = code[start : code.index("\nSAID")]
    words += ["--functions", f"from pathlib import Path\n\n{body}"]
subprocess.run(words, env={**os.environ, "LLM_USER_PATH": str(home)}, check=True)
