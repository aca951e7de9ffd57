// The server's API: events of a stream, and the key that some servers ask for.

const KEY = "jaxdist-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function call(path, body, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  const answer = await fetch(path, options);
  if (answer.status === 401) {
    await askForKey();
    return call(path, body, signal);
  }
  if (!answer.ok) {
    let message = `the server answered ${answer.status}`;
    try {
      message = (await answer.json()).error.message;
    } catch {
      // An answer from something between us and the server has no such shape.
    }
    throw new Refused(answer.status, message);
  }
  return answer;
}

// The objects of an event stream, one by one.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(200, event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    field.value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, field.value.trim());
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}
