import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from common import KEY, MODEL, URL

entry = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
file = Path(os.environ["HOME"]) / "proxy.json"  # JSON is YAML
file.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": entry}]}))
with socket.create_server(("127.0.0.1", 0)) as sock:
    port = sock.getsockname()[1]
url = f"http://127.0.0.1:{port}"
program = str(Path(sys.executable).parent / "litellm")
words = [program, "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
environ = {**os.environ, "LITELLM_MASTER_KEY": KEY}
with subprocess.Popen(words, env=environ) as proxy:
    try:
        while proxy.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health/liveliness").close()
                break
            except urllib.error.URLError:
                time.sleep(0.5)
        words = [sys.executable, str(Path(__file__).parent / "openai_sdk.py"), sys.argv[1], url]
        subprocess.run([*words, sys.argv[3]], check=True)
    finally:
        proxy.terminate()
