// The live view of the engine: figures, the map of its blocks, its batch.

import { call, events } from "./api.js";
import { BlockMap } from "./block_map.js";

const $ = (id) => document.getElementById(id);
const SECONDS = 60; // shown of the past
const past = []; // {time, tokens, rate}
const maps = [];
const hues = new Map(); // of the requests that run, by label
let numSeen = 0;

export async function watch(onState) {
  for (;;) {
    try {
      const answer = await call("/engine?stream=true");
      for await (const now of events(answer)) {
        onState(now.state);
        if (!document.hidden) show(now);
      }
    } catch {
      // The server is away; it may come back.
    }
    onState("the server cannot be reached");
    await new Promise((resolve) => setTimeout(resolve, 1500));
  }
}

// Neighbours in time get colours that are far apart.
function colour(now) {
  const requests = now.replicas.flatMap((replica) => replica.requests);
  const labels = new Set(requests.map((request) => request.label));
  for (const label of hues.keys()) if (!labels.has(label)) hues.delete(label);
  for (const request of requests) {
    if (!hues.has(request.label)) hues.set(request.label, Math.round(210 + 137.5 * numSeen++) % 360);
    request.hue = hues.get(request.label);
  }
}

function show(now) {
  colour(now);
  const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;
  const sum = (name) => now.replicas.reduce((total, replica) => total + replica[name], 0);
  measure(now);
  const { rate } = past.at(-1);
  $("rate").textContent = rate.toFixed(rate && rate < 10 ? 1 : 0);
  $("running").textContent = `${now.num_running} of ${sum("num_slots")}`;
  $("waiting").textContent = now.num_waiting;
  $("used").textContent = percent(sum("num_used") / Math.max(1, sum("num_blocks")));
  $("hits").textContent = now.prefix_queries ? percent(now.prefix_hits / now.prefix_queries) : "–";
  $("waste").textContent = percent(Math.max(0, ...now.replicas.map((replica) => replica.waste)));
  $("compilations").textContent = now.num_compilations;
  drawSpark();
  while (maps.length < now.replicas.length) {
    maps.push(new BlockMap($("maps"), $("map-note")));
  }
  now.replicas.forEach((replica, i) => maps[i].show(replica, now.replicas.length > 1 ? i : null));
  showBatch(now);
}

// Tokens a second, over the last two seconds.
function measure(now) {
  const tokens = now.generation_tokens;
  while (past.length && past[0].time < now.time - SECONDS) past.shift();
  const before = past.findLast((point) => point.time < now.time - 2) ?? past[0];
  const rate = before && now.time > before.time ? (tokens - before.tokens) / (now.time - before.time) : 0;
  past.push({ time: now.time, tokens, rate: Math.max(0, rate) });
}

function drawSpark() {
  const canvas = $("spark");
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const top = Math.max(1, ...past.map((point) => point.rate));
  const x = (point) => width - ((past.at(-1).time - point.time) / SECONDS) * width;
  const y = (point) => height - 2 - (point.rate / top) * (height - 6);
  const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  pen.beginPath();
  past.forEach((point, i) => (i ? pen.lineTo(x(point), y(point)) : pen.moveTo(x(point), y(point))));
  pen.strokeStyle = accent;
  pen.lineWidth = 1.8;
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(past[0]), height);
  pen.globalAlpha = 0.13;
  pen.fillStyle = accent;
  pen.fill();
}

function showBatch(now) {
  const rows = now.replicas.flatMap((replica) => replica.requests).slice(0, 12).map((request) => {
    const row = document.createElement("li");
    const chip = document.createElement("span");
    chip.className = "chip";
    chip.style.background = `hsl(${request.hue} 52% var(--light))`;
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = request.label;
    const blocks = document.createElement("span");
    blocks.className = "blocks";
    blocks.textContent = `${request.num_blocks} block${request.num_blocks === 1 ? "" : "s"}`;
    row.append(chip, name, blocks);
    return row;
  });
  const left = now.num_running - rows.length;
  if (!rows.length || left > 0) {
    const row = document.createElement("li");
    row.className = "none";
    row.textContent = rows.length ? `and ${left} more` : "Nothing is running.";
    rows.push(row);
  }
  $("batch").replaceChildren(...rows);
}
