// The chat: messages, the answer as it comes, stop and regenerate.

import { call, events, Refused } from "./api.js";
import { render } from "./markdown.js";
import { sampling, systemMessage } from "./sampling.js";

const $ = (id) => document.getElementById(id);
const history = []; // {role, content}
let model = null;
let running = null; // the AbortController of the answer that is being written

export function setModel(name) {
  model = name;
  $("model").textContent = name;
  $("welcome-model").textContent = name;
  refresh();
}

export function startChat() {
  $("message").addEventListener("input", grow);
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", stop);
  $("new-chat").addEventListener("click", clear);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  for (const button of $("ideas").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      $("message").value = button.textContent;
      send();
    });
  }
  $("message").focus();
}

function grow() {
  const field = $("message");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
  refresh();
}

function refresh() {
  $("send").disabled = !model || !$("message").value.trim();
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("welcome").hidden = history.length > 0;
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  history.length = 0;
  $("messages").replaceChildren();
  refresh();
  $("message").focus();
}

function send() {
  const text = $("message").value.trim();
  if (!text || !model || running) return;
  $("message").value = "";
  history.push({ role: "user", content: text });
  const item = message("user", "You");
  item.querySelector(".body").textContent = text;
  grow();
  answer();
}

function message(role, name) {
  const item = document.createElement("li");
  item.className = `message ${role}`;
  const title = document.createElement("span");
  title.className = "hidden";
  title.textContent = `${name}: `;
  const body = document.createElement("div");
  body.className = "body";
  item.append(title, body);
  $("messages").append(item);
  return item;
}

async function answer() {
  const item = message("assistant", model);
  const body = item.querySelector(".body");
  item.classList.add("waiting");
  const scroll = follow();
  running = new AbortController();
  refresh();
  scroll(true);
  const began = performance.now();
  let text = "", first = 0, usage = null, drawn = 0, failure = null, reason = null;
  const draw = () => {
    drawn = 0;
    item.classList.toggle("waiting", !text);
    item.classList.toggle("writing", Boolean(text) && Boolean(running));
    body.replaceChildren(...render(text));
    scroll();
  };
  try {
    const system = systemMessage();
    const messages = system ? [{ role: "system", content: system }, ...history] : history;
    const request = { model, messages, stream: true, stream_options: { include_usage: true }, ...sampling() };
    const response = await call("/v1/chat/completions", request, running.signal);
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      reason = choice?.finish_reason ?? reason;
      if (choice?.delta.content) {
        first ||= performance.now();
        text += choice.delta.content;
        drawn ||= requestAnimationFrame(draw);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      failure = error instanceof Refused ? error.message : "the server cannot be reached";
    }
  }
  const stopped = running.signal.aborted;
  running = null;
  cancelAnimationFrame(drawn);
  draw();
  item.classList.remove("waiting", "writing");
  if (!item.isConnected) return refresh(); // a new chat was begun meanwhile
  history.push({ role: "assistant", content: text });
  if (failure) body.append(errorNote(failure));
  item.append(meta(item, text, numbers(usage, began, first, stopped, reason)));
  $("announce").textContent = failure ?? (stopped ? "Stopped." : text);
  scroll();
  refresh();
  if (!document.activeElement || document.activeElement === document.body) $("message").focus();
}

// Keeps the end in sight, unless the reader has scrolled away from it.
function follow() {
  const box = $("scroll");
  let height = box.scrollHeight;
  return (always = false) => {
    const wasAtEnd = box.scrollTop + box.clientHeight > height - 60;
    height = box.scrollHeight;
    if (always || wasAtEnd) box.scrollTop = height;
  };
}

function errorNote(text) {
  const note = document.createElement("p");
  note.className = "error";
  note.setAttribute("role", "alert");
  note.textContent = `${text[0].toUpperCase()}${text.slice(1)}.`.replace(/\.\.$/, ".");
  return note;
}

function numbers(usage, began, first, stopped, reason) {
  const parts = [];
  if (stopped) parts.push("stopped");
  if (reason === "length") parts.push("cut at the most tokens");
  if (usage && first) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second`);
  }
  if (first) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  return parts.join(" · ");
}

function meta(item, text, figures) {
  const row = document.createElement("div");
  row.className = "meta";
  const button = (label, action) => {
    const node = document.createElement("button");
    node.type = "button";
    node.className = "quiet";
    node.textContent = label;
    node.addEventListener("click", () => action(node));
    row.append(node);
  };
  if (text) {
    button("Copy", async (node) => {
      await navigator.clipboard.writeText(text);
      node.textContent = "Copied";
      setTimeout(() => { node.textContent = "Copy"; }, 1500);
    });
  }
  for (const old of $("messages").querySelectorAll(".regenerate")) old.remove();
  button("Regenerate", () => regenerate(item));
  row.lastChild.classList.add("regenerate");
  const told = document.createElement("span");
  told.className = "numbers";
  told.textContent = figures;
  row.append(told);
  return row;
}

function regenerate(item) {
  if (running) return;
  history.pop();
  item.remove();
  answer();
}
