// The page: what is asked is in the URL; each change asks the server anew and draws its answers.
import { show as dialog, surround } from "./chrome.js";
import { $, el } from "./dom.js";
import { panels } from "./draw.js";
import { command, empty, question, read, write } from "./state.js";

const KINDS = ["describe", "serve", "train", "curves", "ranks"];
const WAIT = 150; // ms of typing before a question
let state = empty(), catalogue = null, sizes = [], latest = {}, asking = 0, timer = 0, stop = new AbortController();

async function fetched(path, body) {
  const sent = body && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: stop.signal };
  const response = await fetch(path, sent);
  const text = await response.text();
  const document = JSON.parse(text);
  if (document.error) throw Object.assign(new Error(document.error.message), { field: document.error.field });
  return { document, text };
}

// Returns the documents of the question, and the messages of those that have none.
async function documents(kinds, changed) {
  const found = {}, texts = {}, problems = [];
  await Promise.all(kinds.map(async (kind) => {
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
  stop.abort(); // what was asked before is not waited for
  stop = new AbortController();
  $("status").textContent = "computing …";
  $("panels").classList.add("stale");
  const moved = Object.keys(state.set).length > 0;
  await fields(mine);
  const [now, before] = await Promise.all([documents(KINDS, true), moved ? documents(KINDS, false) : null]);
  if (mine !== asking) return;
  const old = before && before.found.describe ? before.found : null;
  shown(now, old);
  const slow = [state.serving.search && now.found.serve && "layouts", state.training.search && now.found.train && "ranked"].filter(Boolean);
  if (slow.length) {
    $("status").textContent = "ranking layouts …";
    const more = await documents(slow, true);
    if (mine !== asking) return;
    const found = { ...now.found, serve: more.found.layouts ?? now.found.serve, train: more.found.ranked ?? now.found.train };
    shown({ found, texts: { ...now.texts, ...more.texts }, problems: [...now.problems, ...more.problems] }, old);
  }
  $("status").textContent = "";
  document.body.dataset.drawn = String(mine);
}

function shown(now, old) {
  latest = now;
  report(now.problems);
  draw(now.found, old);
  $("panels").classList.remove("stale");
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
  dialog(title, kind === "config" ? latest.config : latest.texts[kind], command(state, kind));
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

const ticked = (label, where, key) => {
  const id = `${where}-${key}`;
  const act = (event) => change(where, key, event.target.checked ? "yes" : "");
  return el("label", { for: id, class: "check wide" }, el("input", { id, type: "checkbox", on: { change: act } }), label);
};

function form() {
  const c = catalogue, on = (where) => ({ words: (label, key, placeholder) => text(label, key, where, key, { placeholder }), one: (label, key, values, none) => choice(label, key, where, key, values, none) });
  const { words, one } = on("serving"), training = on("training");
  $("models").replaceChildren(...c.models.map((name) => el("option", { value: name })));
  $("model").dataset.field = "model";
  $("machine").replaceChildren(
    one("Machine", "gpu", c.machines), words("Count", "gpus", "1"),
    words("Tensor parallel", "tp", "automatic"), words("Pipeline stages", "pp", "automatic"), words("Expert parallel", "ep", "1"),
    words("Devices per node", "node", "8"), words("Network of a device", "network", "400Gb/s"));
  $("serving").replaceChildren(
    one("Weights", "dtype", c.dtypes, "as published"), one("Cache", "kv_dtype", c.kv_dtypes, "by default"),
    words("Context", "context", "8192, 128K"), words("Users", "users", "as many as fit"),
    words("Time per token", "latency_target", "20ms"), words("First token", "first_token_target", "0.5s"),
    one("Engine", "engine", Object.keys(c.engines)), words("Sequences at once", "max_num_seqs", "the engine's"), words("Prefill chunk", "chunk", "the engine's"),
    words("Price of a device-hour", "price", "$2.50/h"), ticked("Rank layouts", "serving", "search"));
  $("workload").replaceChildren(
    words("Input tokens", "input_tokens", "2k"), words("Output tokens", "output_tokens", "300"), words("Rate", "rate", "5/s"), one("Arrivals", "arrivals", ["poisson", "even"]),
    words("Cached share of prompts", "prefix_share", "0"), words("Drafted tokens", "speculate", "0"), words("Accepted share", "acceptance", "0.7"));
  $("training").replaceChildren(
    training.words("Count", "gpus", "1"), training.words("ZeRO stage", "zero", "0"),
    training.words("Micro-batch", "batch", "1"), training.words("Accumulate", "accumulate", "1"),
    training.words("Sequence", "seq", "4096"), training.one("Checkpointing", "checkpointing", c.checkpointing),
    training.words("Tensor parallel", "tp", "1"), training.words("Pipeline stages", "pp", "1"), training.words("Expert parallel", "ep", "1"), training.words("Context parallel", "cp", "1"),
    training.one("Schedule", "schedule", c.schedules, "by default"), training.one("Weights", "dtype", c.trained),
    training.one("Optimizer", "optimizer", c.optimizers), training.words("Tokens", "tokens", "15T"), training.words("Price of a GPU-hour", "price", "2.50"),
    ticked("Rank layouts", "training", "search"));
}

function show() {
  $("model").value = state.model;
  for (const input of $("form").querySelectorAll('[id^="serving-"], [id^="training-"]')) {
    const [where, ...rest] = input.id.split("-");
    const value = state[where][rest.join("-")] ?? "";
    if (input.tagName === "SELECT" && value && ![...input.options].some((one) => one.value === value)) input.append(el("option", { value }, value));
    if (input.type === "checkbox") input.checked = value !== "";
    else input.value = value || (input.tagName === "SELECT" ? input.options[0].value : "");
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
  $("panels").addEventListener("use", ({ detail: { where, values } }) => {
    for (const [key, value] of Object.entries(values)) {
      if (value === "") delete state[where][key];
      else state[where][key] = String(value);
    }
    show();
    later();
  });
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
