import json
import os
import subprocess
import sys
from pathlib import Path

from common import MODEL, URL, say

report = Path(os.environ["HOME"]) / "report.json"
options = {
    "--backend": f"kind=openai_http,target={URL},model={MODEL}",
    "--tokenizer": f"kind=huggingface_auto,model={os.environ['TOKENIZER']}",
    "--profile": "kind=synchronous",
    "--constraint": "kind=max_requests,count=3",
    "--data": "kind=synthetic_text,prompt_tokens=20,output_tokens=32",
    "--output": f"kind=json,path={report}",
}
words = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
for name, value in options.items():
    words += [name, value]
subprocess.run(words, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
(benchmark,) = json.loads(report.read_text())["benchmarks"]
requests = benchmark["requests"]
assert not requests["errored"], requests["errored"][0]["error"]
assert len(requests["successful"]) == 3
for request in requests["successful"]:
    assert request["output_tokens"] == 32, request
    assert request["info"]["timings"]["token_iterations"] > 1, request
    say(request["output"][:29])
