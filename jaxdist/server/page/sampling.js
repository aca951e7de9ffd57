// The sampling controls; what was chosen is remembered in this browser.

const STORE = "jaxdist-sampling";
const $ = (id) => document.getElementById(id);
const RANGES = ["temperature", "top_p", "min_p", "repetition_penalty"];
const NUMBERS = ["top_k", "max_tokens", "seed"];

export function startSampling() {
  const form = $("sampling");
  const saved = JSON.parse(localStorage.getItem(STORE) ?? "{}");
  for (const [name, value] of Object.entries(saved)) {
    const field = $(name);
    if (field && form.contains(field)) field.value = value;
  }
  form.addEventListener("input", keep);
  form.addEventListener("reset", () => setTimeout(keep));
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

// What the model samples by where nothing was chosen here.
export function suggest(values) {
  const chosen = localStorage.getItem(STORE) !== null;
  for (const [name, value] of Object.entries(values)) {
    const field = $(name);
    if (!field || !$("sampling").contains(field)) continue;
    field.defaultValue = value;
    if (!chosen) field.value = value;
  }
  show();
}

function keep() {
  const values = [...RANGES, ...NUMBERS, "system"].map((name) => [name, $(name).value]);
  localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(values)));
  show();
}

function show() {
  for (const name of RANGES) {
    document.querySelector(`output[for="${name}"]`).textContent = Number($(name).value).toFixed(2);
  }
}

export function sampling() {
  const values = RANGES.map((name) => [name, Number($(name).value)]);
  for (const name of NUMBERS) {
    const field = $(name);
    if (field.value !== "" && field.checkValidity()) values.push([name, Number(field.value)]);
  }
  return Object.fromEntries(values);
}

export function systemMessage() {
  return $("system").value.trim();
}
