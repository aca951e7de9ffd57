"""Starts a server, asks it one question as any client of OpenAI's API would, and stops it.

python scripts/ask.py --model runs/quickstart --prompt "JULIET:" --max-tokens 60
"""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

FEW = ("--max-num-seqs", "2", "--max-model-len", "256")  # one client asks: little to compile


def main() -> int:
    """Print the answer; the server's exit code where it did not start, 2 where it refuses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=60)
    options = parser.parse_args()
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jaxdist.serve", "--model", options.model]
    server = subprocess.Popen([*command, "--port", str(port), *FEW])
    try:
        while not _is_ready(url):
            if server.poll() is not None:
                return server.returncode
            time.sleep(0.2)
        body = {"prompt": options.prompt, "max_tokens": options.max_tokens, "temperature": 0.8}
        print(f"POST {url}/v1/completions {json.dumps(body)}")
        print(options.prompt + _post(f"{url}/v1/completions", body)["choices"][0]["text"])
    except urllib.error.HTTPError as refused:
        print(f"ask: error: {json.load(refused)['error']['message']}", file=sys.stderr)
        return 2
    finally:
        server.terminate()
        server.wait()
    return 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return answer.status == 200
    except OSError:  # not there yet, or it says 503
        return False


def _post(url: str, body: dict) -> dict:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
