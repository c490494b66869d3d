// The form: each control is an option of the command line, where its user would look for it; the rarer ones are folded.
import { $, el } from "./dom.js";
import { joined, split } from "./state.js";

const NUMBERS = "memory=80GB,bandwidth=2TB/s,bf16=312T";

// What is asked is changed by `change(where, key, value)`; a control's id is `where-key`, and "" is the default.
export function controls(change) {
  const labelled = (label, id, input, kind = "") => el("label", { for: id, class: kind }, label, input);
  const text = (label, field, where, key, more = {}) => {
    const id = `${where}-${key}`, act = (event) => change(where, key, event.target.value.trim());
    return labelled(label, id, el("input", { id, "data-field": field, autocomplete: "off", spellcheck: "false", inputmode: "text", on: { input: act }, ...more }));
  };
  const on = (where) => ({
    words: (label, key, placeholder, more = {}) => text(label, key, where, key, { placeholder, ...more }),
    one: (label, key, values, none) => {
      const id = `${where}-${key}`, act = (event) => change(where, key, event.target.value);
      return labelled(label, id, el("select", { id, "data-field": key, on: { change: act } }, none === undefined ? null : el("option", { value: "" }, none), values.map((value) => el("option", { value }, value))));
    },
    tick: (label, key, value = "yes") => {
      const id = `${where}-${key}`, act = (event) => change(where, key, event.target.checked ? value : "");
      return labelled([el("input", { id, "data-field": key, value, type: "checkbox", on: { change: act } })], id, label, "check wide");
    },
  });
  return { text, on };
}

const folded = (title, ...inside) => el("details", { class: "wide more" }, el("summary", {}, title, el("small", {})), el("div", { class: "fields" }, inside));

export function fill(catalogue, change, machine) {
  const { on } = controls(change), serving = on("serving"), training = on("training");
  $("models").replaceChildren(...catalogue.models.map((name) => el("option", { value: name })));
  $("processors").replaceChildren(...catalogue.processors.map((name) => el("option", { value: name })));
  $("model").dataset.field = "model";
  $("machine").replaceChildren(...machines(catalogue, serving, machine));
  $("serving").replaceChildren(...serves(catalogue, serving));
  $("workload").replaceChildren(...workloads(serving));
  $("training").replaceChildren(...trains(catalogue, training));
}

function machines(c, { words }, machine) {
  const parts = { card: el("select", { id: "serving-gpu" }, c.machines.map((value) => el("option", { value }, value)), el("option", { value: "" }, "by numbers")),
    slice: el("select", { id: "machine-slice" }), numbers: el("input", { id: "machine-numbers", autocomplete: "off", spellcheck: "false" }) };
  const said = () => Object.fromEntries(Object.entries(parts).map(([name, input]) => [name, input.value.trim()]));
  parts.card.addEventListener("change", () => machine(joined({ card: parts.card.value, slice: "", numbers: "" })));
  parts.slice.addEventListener("change", () => machine(joined(said())));
  parts.numbers.addEventListener("input", () => machine(joined(said())));
  for (const input of Object.values(parts)) input.dataset.field = "gpu";
  const labelled = (label, input, kind = "") => el("label", { for: input.id, class: kind }, label, input);
  return [labelled("Machine", parts.card), words("Count", "gpus", "1"),
    words("Tensor parallel", "tp", "automatic"), words("Pipeline stages", "pp", "automatic"), words("Expert parallel", "ep", "1"), words("Replicas of experts", "redundant_experts", "0"), words("Devices per node", "node", "8"),
    words("Network of a device", "network", "400Gb/s"), words("Link to host memory", "host", "25GB/s"),
    folded("MIG slice, other numbers", labelled("MIG slice", parts.slice), labelled("Numbers that replace its own", parts.numbers, "wide"))];
}

// Shows a machine in its three controls: a card, a slice of it, and numbers that replace the card's or are the whole.
export function showMachine(gpu, catalogue) {
  const said = split(gpu, catalogue.slices), card = $("serving-gpu"), slice = $("machine-slice");
  if (![...card.options].some((one) => one.value === said.card)) card.append(el("option", { value: said.card }, said.card));
  card.value = said.card;
  const known = catalogue.slices[said.card] ?? [];
  slice.replaceChildren(el("option", { value: "" }, known.length ? "the whole card" : "not divided"), ...known.map((value) => el("option", { value }, value)));
  slice.value = said.slice;
  slice.disabled = !known.length;
  $("machine-numbers").placeholder = said.card ? "bf16=990T" : NUMBERS;
  if (document.activeElement !== $("machine-numbers")) $("machine-numbers").value = said.numbers;
}

function serves(c, { words, one, tick }) {
  const convention = (label, key, none = c.conventions[key][0]) => one(label, key, c.conventions[key].filter((value) => value !== none), none);
  return [one("Weights", "dtype", c.dtypes, "as published"), one("Cache", "kv_dtype", c.kv_dtypes, "by default"),
    words("Context", "context", "8192, 128K"), words("Users", "users", "as many as fit"),
    words("Time per token", "latency_target", "20ms"), words("First token", "first_token_target", "0.5s"),
    one("Engine", "engine", Object.keys(c.engines)), words("Sequences at once", "max_num_seqs", "the engine's"), words("Prefill chunk", "chunk", "the engine's"),
    words("Price of a device-hour", "price", "$2.50/h"), tick("Rank layouts", "search"), tick("Suggest cards of any vendor", "any_vendor"),
    folded("Pools for prefill and decode", words("GPUs that prefill", "prefill_gpus", "8,tp=4"), words("GPUs that decode", "decode_gpus", "16,tp=8"), one("A cache is sent", "kv_transfer", ["layerwise"], "after its prompt")),
    folded("Host memory", words("GPU layers (-ngl)", "n_gpu_layers", "all", { "data-field": "n_gpu_layers ngl" }), words("Host's experts, layers", "n_cpu_moe", "0"),
      words("Processor", "cpu", "epyc-9654", { list: "processors" }), words("Cache of waiting users", "kv_host", "64GiB")),
    folded("LoRA adapters", words("Adapters", "lora", "0"), words("Rank", "lora_rank", "16"), words("Linear maps", "lora_targets", "all in the blocks")),
    folded("Memory and speed of the engine", words("Share of memory used", "utilisation", "the engine's"), words("Kept free", "reserve", "0"),
      words("Graphs, workspace", "workspace", "1GiB"), words("All overhead as one", "overhead", "2GiB"), one("Pages", "page", ["yes", "no"], "the engine's"), words("Tokens of a page", "block_size", "the engine's"),
      words("Prompt that is timed", "prompt", "one chunk"), convention("Targets", "targets"),
      words("Share of bandwidth", "bandwidth_efficiency", "expected"), words("Share of FLOP rate", "compute_efficiency", "expected")),
    folded("Conventions", convention("Device memory", "memory"), convention("Embedding", "embedding"), convention("FLOPs", "flops"), convention("Scores", "scores"), convention("Users", "count"),
      one("Windows", "windows", c.conventions.windows, "the engine's"), one("Attention", "kernel", c.conventions.kernel, "the engine's"))];
}

function workloads({ words, one }) {
  return [words("Input tokens", "input_tokens", "2k"), words("Output tokens", "output_tokens", "300"), words("Rate", "rate", "5/s"), one("Arrivals", "arrivals", ["even"], "poisson"),
    folded("Lengths file, caching, drafts, seed",
      el("label", { class: "drop wide", id: "lengths-drop", for: "lengths" }, "Lengths of requests: drop a file here, or choose it. A line has tokens of a prompt and of its answer.",
        el("input", { type: "file", id: "lengths", accept: ".txt,.csv,text/plain,text/csv", "data-field": "lengths" })),
      el("p", { class: "row wide", id: "lengths-row", hidden: true }, el("span", { id: "lengths-said" }), el("button", { type: "button", id: "lengths-drop-it" }, "Remove")),
      words("Cached share of prompts", "prefix_share", "0"), words("Drafted tokens", "speculate", "0"), words("Accepted share", "acceptance", "0.7"), words("Steps a draft takes", "draft_cost", "0"),
      words("Requests simulated", "requests", "1,000 or more"), words("Seed", "seed", "0"))];
}

function trains(c, { words, one, tick }) {
  return [words("Count", "gpus", "1"), words("ZeRO stage", "zero", "0"), words("Micro-batch", "batch", "1"), words("Accumulate", "accumulate", "1"),
    words("Sequence", "seq", "4096"), one("Checkpointing", "checkpointing", c.checkpointing),
    words("Tensor parallel", "tp", "1"), words("Pipeline stages", "pp", "1"), words("Expert parallel", "ep", "1"), words("Context parallel", "cp", "1"),
    one("Schedule", "schedule", c.schedules, "by default"), one("Weights", "dtype", c.trained),
    one("Optimizer", "optimizer", c.optimizers), words("Tokens", "tokens", "15T"), words("Price of a GPU-hour", "price", "2.50"), tick("Rank layouts", "search"),
    folded("LoRA adapters", words("Rank", "lora", "full training"), words("Linear maps", "targets", "all in the blocks"), tick("Frozen matrices in NF4 (QLoRA)", "qlora")),
    folded("Memory", one("Gradients", "gradient_dtype", c.trained, "as weights"), one("Offload", "offload", c.offloads.filter((value) => value !== "none"), "none"), one("Cross-entropy", "loss", c.losses.slice(1), c.losses[0]),
      words("Chunks of the loss", "chunked_loss", "1"), tick("Documents of a sequence apart", "documents"), words("Share left unused", "reserve", "0.05"), tick("No fp32 master weights", "master", "no")),
    folded("Parallelism and precision", words("Tokens per step", "tokens_per_step", "4M"), words("Ranks of a shard (HSDP)", "hsdp", "all"), words("Chunks per stage", "interleave", "by default"), words("Vocabulary padded to", "pad_vocabulary", "1"), words("Nodes of a token's experts", "expert_nodes", "all"),
      tick("Products in fp8", "fp8"), tick("Rows to experts in fp8", "fp8_dispatch"), tick("Experts overlap", "overlap_experts"), tick("Tensor-parallel sums overlap (AsyncTP)", "overlap_tensor"), tick("Context is gathered, no ring", "gather_context"),
      tick("No sequence parallelism", "sequence_parallel", "no"), tick("Vocabulary is not divided", "divide_vocabulary", "no")),
    folded("Speed", words("MFU of the whole step", "utilisation", "computed"), words("Kernel efficiency", "kernel_efficiency", "computed"), words("Attention's efficiency", "attention_efficiency", "0.5"), words("Share of time in steps", "effective_time", "0.9"))];
}

// Opens each folded group in which something is set or wrong, and says beside its name how much is set.
export function unfold() {
  for (const group of document.querySelectorAll("details.more")) {
    const inputs = [...group.querySelectorAll("input:not([type=file]), select")];
    const set = inputs.filter((one) => (one.type === "checkbox" ? one.checked : one.value !== "")).length + (group.querySelector("#lengths-row:not([hidden])") ? 1 : 0);
    group.querySelector("small").textContent = set ? ` ${set} set` : "";
    if (set || group.querySelector('[aria-invalid="true"]')) group.open = true;
  }
}

// Marks the controls that a document's refusal names, and says there what is wrong.
export function mark(problems, ofTraining) {
  for (const input of document.querySelectorAll("[data-field]")) {
    const names = input.dataset.field.split(" "), where = input.id.split("-")[0];
    const concerns = ({ kind }) => !["serving", "training"].includes(where) || kind === "" || names.some((name) => ["gpu", "node", "network", "host"].includes(name)) || ofTraining.includes(kind) === (where === "training");
    const wrong = problems.find((one) => concerns(one) && said(one.field).some((name) => names.includes(name)));
    const label = input.closest("label");
    input.setAttribute("aria-invalid", String(Boolean(wrong)));
    label.querySelector(".wrong")?.remove();
    if (!wrong) input.removeAttribute("aria-describedby");
    else {
      input.setAttribute("aria-describedby", "problems");
      label.append(el("small", { class: "wrong", "aria-hidden": "true" }, wrong.message));
    }
  }
  unfold();
}

// A refusal's field may say where within it: "lengths: line 3", or be two.
const said = (field) => [field, ...field.split(/: | \+ |, /)].flatMap((name) => [name, name.replaceAll("-", "_")]);
