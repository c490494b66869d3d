// The page: what is asked is in the URL; each change asks the server anew and draws its answers.
import { show as dialog, surround } from "./chrome.js";
import { $, el } from "./dom.js";
import { panels } from "./draw.js";
import { command, empty, question, read, write } from "./state.js";

const KINDS = ["describe", "serve", "train", "curves"];
const WAIT = 150; // ms of typing before a question
let state = empty(), catalogue = null, sizes = [], latest = {}, asking = 0, timer = 0;

async function fetched(path, body) {
  const sent = body && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(path, sent);
  const text = await response.text();
  const document = JSON.parse(text);
  if (document.error) throw Object.assign(new Error(document.error.message), { field: document.error.field });
  return { document, text };
}

// Returns the documents of the question, and the messages of those that have none.
async function documents(changed) {
  const found = {}, texts = {}, problems = [];
  await Promise.all(KINDS.map(async (kind) => {
    try {
      const { document, text } = await fetched(`api/${kind}`, question(state, kind, changed));
      found[kind] = document;
      texts[kind] = text;
    } catch (error) {
      problems.push({ kind, field: error.field ?? "", message: error.message });
    }
  }));
  return { found, texts, problems };
}

async function ask() {
  const mine = (asking += 1);
  $("status").textContent = "computing …";
  $("panels").classList.add("stale");
  const moved = Object.keys(state.set).length > 0;
  await fields(mine);
  const [now, before] = await Promise.all([documents(true), moved ? documents(false) : null]);
  if (mine !== asking) return;
  latest = now;
  report(now.problems);
  draw(now.found, before && before.found.describe ? before.found : null);
  $("panels").classList.remove("stale");
  $("status").textContent = "";
  document.body.dataset.drawn = String(mine);
}

function report(problems) {
  const said = [...new Map(problems.map((one) => [one.message, one])).values()];
  $("problems").replaceChildren(...said.map((one) => el("p", { class: "problem" }, el("b", {}, "✗ "), one.message)));
  for (const input of document.querySelectorAll("[data-field]")) {
    const wrong = said.some((one) => one.field === input.dataset.field || one.field.endsWith(`: ${input.dataset.field}`) || one.field.replaceAll("-", "_") === input.dataset.field);
    input.setAttribute("aria-invalid", String(wrong));
  }
}

function draw(now, before) {
  const opened = [...document.querySelectorAll('[aria-expanded="true"]')].map((one) => one.closest("tr").dataset.figure);
  $("panels").replaceChildren(...panels(now, before, open));
  for (const figure of opened.filter(Boolean)) document.querySelector(`[data-figure="${figure}"] .open`)?.click();
  const name = state.model || "config.json";
  $("question").textContent = now.serve ? `${name} on ${now.serve.layout.gpus} × ${now.serve.machine}, ${now.serve.context.toLocaleString("en-US")} tokens per user` : name;
  document.title = `${name} · asbuilt`;
}

function open(title, kind) {
  const printed = kind === "config" || kind === "curves" ? "" : command(state, kind);
  dialog(title, kind === "config" ? latest.config : latest.texts[kind], printed);
}

// ---- the form

const text = (label, field, where, key, more = {}) => {
  const id = `${where}-${key}`;
  const act = (event) => change(where, key, event.target.value.trim());
  return el("label", { for: id }, label, el("input", { id, "data-field": field, autocomplete: "off", spellcheck: "false", inputmode: "text", on: { input: act }, ...more }));
};

const choice = (label, field, where, key, values, none) => {
  const id = `${where}-${key}`;
  const options = values.map((value) => (Array.isArray(value) ? value : [value, value]));
  return el("label", { for: id }, label, el("select", { id, "data-field": field, on: { change: (event) => change(where, key, event.target.value) } },
    none === undefined ? null : el("option", { value: "" }, none), options.map(([value, name]) => el("option", { value }, name))));
};

function form() {
  const c = catalogue;
  $("models").replaceChildren(...c.models.map((name) => el("option", { value: name })));
  $("model").dataset.field = "model";
  $("serving").replaceChildren(
    choice("Machine", "gpu", "serving", "gpu", c.machines), text("Count", "gpus", "serving", "gpus", { placeholder: "1" }),
    choice("Weights", "dtype", "serving", "dtype", c.dtypes, "as published"), choice("Cache", "kv_dtype", "serving", "kv_dtype", c.kv_dtypes, "by default"),
    text("Context", "context", "serving", "context", { placeholder: "8192, 128K" }), text("Users", "users", "serving", "users", { placeholder: "as many as fit" }),
    text("Time per token", "latency_target", "serving", "latency_target", { placeholder: "20ms" }), text("First token", "first_token_target", "serving", "first_token_target", { placeholder: "0.5s" }),
    choice("Engine", "engine", "serving", "engine", Object.keys(c.engines)));
  $("serving").lastChild.classList.add("wide");
  $("training").replaceChildren(
    text("Count", "gpus", "training", "gpus", { placeholder: "1" }), text("ZeRO stage", "zero", "training", "zero", { placeholder: "0" }),
    text("Micro-batch", "batch", "training", "batch", { placeholder: "1" }), text("Accumulate", "accumulate", "training", "accumulate", { placeholder: "1" }),
    text("Sequence", "seq", "training", "seq", { placeholder: "4096" }), choice("Checkpointing", "checkpointing", "training", "checkpointing", c.checkpointing),
    text("Tensor parallel", "tp", "training", "tp", { placeholder: "1" }), text("Pipeline stages", "pp", "training", "pp", { placeholder: "1" }),
    choice("Optimizer", "optimizer", "training", "optimizer", c.optimizers), text("Tokens", "tokens", "training", "tokens", { placeholder: "20 per parameter" }));
}

function show() {
  $("model").value = state.model;
  for (const where of ["serving", "training"]) {
    for (const input of $(where).querySelectorAll("input, select")) {
      const value = state[where][input.id.split("-")[1]] ?? "";
      if (input.tagName === "SELECT" && value && ![...input.options].some((one) => one.value === value)) input.append(el("option", { value }, value));
      input.value = value || (input.tagName === "SELECT" ? input.options[0].value : "");
    }
  }
}

// The sizes of the model's config that can be changed; they differ by family.
async function fields(mine) {
  try {
    const { document } = await fetched("api/config", question(state, "config", false));
    if (mine !== asking) return;
    const same = sizes.length === document.editable.length && sizes.every((one, i) => one.key === document.editable[i].key);
    sizes = document.editable;
    if (!same) $("sizes").replaceChildren(...sizes.map(size));
    if (state.config === null) state.model = document.name;
  } catch {
    sizes = [];
    $("sizes").replaceChildren();
  }
  for (const one of sizes) {
    const input = $(`set-${one.key}`), value = state.set[one.key] ?? String(one.value);
    if (document.activeElement !== input) input.value = value;
    input.closest("label").classList.toggle("changed", one.key in state.set);
    input.closest("label").querySelector("small").textContent = one.key in state.set ? `was ${one.value.toLocaleString("en-US")}` : "";
  }
  $("changes").hidden = sizes.length === 0;
}

function size(one) {
  const label = text(one.label, one.key, "set", one.key, { inputmode: "numeric" });
  label.title = one.key;
  label.append(el("small", {}));
  return label;
}

function change(where, key, value) {
  const was = sizes.find((one) => one.key === key);
  if (value === "" || (where === "set" && String(was?.value) === value)) delete state[where][key];
  else state[where][key] = value;
  later();
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    remember();
    ask();
  }, WAIT);
}

function remember() {
  const hash = write(state);
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

async function take(file) {
  try {
    if (file.size > 1 << 20) throw new Error("larger than 1 MiB");
    const config = JSON.parse(await file.text());
    state = { ...state, config, set: {}, model: file.name.replace(/\.json$/, "") || "config" };
    show();
    later();
  } catch (error) {
    report([{ field: "config", message: `${file.name}: not a config.json: ${error.message}` }]);
  }
}

function listen() {
  $("form").addEventListener("submit", (event) => event.preventDefault());
  $("model").addEventListener("change", (event) => {
    state = { ...state, model: event.target.value.trim(), config: null, set: {} };
    later();
  });
  $("file").addEventListener("change", (event) => event.target.files[0] && take(event.target.files[0]));
  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      $("drop").classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
    });
  }
  $("undo").addEventListener("click", () => {
    state.set = {};
    later();
  });
  $("config").addEventListener("click", async () => {
    try {
      latest.config = JSON.stringify((await fetched("api/config", question(state, "config"))).document.config, null, 2);
      open("The changed model", "config");
    } catch (error) {
      report([{ field: error.field ?? "", message: error.message }]);
    }
  });
  window.addEventListener("hashchange", () => {
    state = read(location.hash);
    start();
  });
}

function start() {
  if (!state.model && state.config === null) state.model = catalogue.given ?? "llama-3-8b";
  show();
  remember();
  ask();
}

surround();
listen();
state = read(location.hash);
catalogue = (await fetched("api/catalogue")).document;
form();
start();
