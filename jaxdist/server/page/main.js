// Starts the page: colours, the side, the chat, the engine's view.

import { call } from "./api.js";
import { setModel, startChat } from "./chat.js";
import { watch } from "./engine.js";
import { startSampling, suggest } from "./sampling.js";
import { startTheme } from "./theme.js";

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 960px)");

function startSide() {
  const open = (shown) => {
    document.querySelector(".columns").classList.toggle("alone", !shown);
    $("toggle-side").setAttribute("aria-expanded", String(shown));
  };
  $("toggle-side").addEventListener("click", () => open($("toggle-side").getAttribute("aria-expanded") !== "true"));
  narrow.addEventListener("change", () => open(!narrow.matches));
  open(!narrow.matches);
}

function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const choose = (chosen) => {
    for (const tab of tabs) {
      const mine = tab === chosen;
      tab.setAttribute("aria-selected", String(mine));
      tab.tabIndex = mine ? 0 : -1;
      $(tab.getAttribute("aria-controls")).hidden = !mine;
    }
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
}

let known = null;

async function onState(state) {
  const ready = state === "ready";
  $("state-dot").className = `dot ${ready ? "ready" : state.includes("load") ? "" : "failed"}`;
  $("state").title = state;
  if (ready && !known) {
    const model = (await (await call("/v1/models")).json()).data[0];
    known = model.id;
    suggest(model.default_sampling_params ?? {});
    document.title = `${known} · jaxdist`;
    setModel(known);
  } else if (!ready && !known) {
    $("model").textContent = state;
  }
}

startTheme();
startSide();
startTabs();
startSampling();
startChat();
watch(onState);
