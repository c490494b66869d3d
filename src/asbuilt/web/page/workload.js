// The panels of a workload, its cost, users by format, and layouts for serving.
import { chart } from "./charts.js";
import { el } from "./dom.js";
import { bytes, difference, digits, money, seconds, share, whole } from "./format.js";
import { cell, derived, devices, head, panel, say, slug, use } from "./parts.js";

const LEVELS = [["middle", "expected"], ["high", "fast"], ["low", "slow"]];

// One row of a table of levels: a name, how to read it from what a level has, how it is written, and what is behind it.
function levels(rows, found, was, key) {
  const columns = was ? 6 : 4;
  return rows.flatMap(([name, of, text, ...behind]) => {
    const values = LEVELS.map(([level]) => (found[level] ? of(found[level]) : null));
    if (values.every((value) => value === null || value === undefined)) return [];
    const old = was?.middle ? of(was.middle) : null;
    const written = (value) => cell(value === null || value === undefined ? "–" : text(value));
    const [expected, ...range] = values.map(written);
    const cells = [expected, ...(was ? [written(old), cell(difference(old, values[0]))] : []), ...range];
    return derived(name, cells, say(...behind), { columns, key: `${key}-${slug(name)}`, moved: was && old !== values[0] });
  });
}

const headed = (was) => {
  const [expected, ...range] = LEVELS.map(([, name]) => [name, "n"]);
  return head([""], expected, ...(was ? [["before", "n"], ["change", "n"]] : []), ...range);
};

const SERVED = [
  ["requests/s", (s) => s.requests_per_second, (n) => digits(n, 4), "requests that are finished, in the steady state"],
  ["tokens/s of answers", (s) => s.output_tokens_per_second, (n) => digits(n, 4), "of all users together, waiting and idle time included"],
  ["tokens/s of prompts", (s) => s.input_tokens_per_second, (n) => digits(n, 4), "prompts that are read, cached prefixes included"],
  ["first token, median", (s) => s.first_token.median, seconds, "from a request's arrival, so waiting is included"],
  ["first token, 95th", (s) => s.first_token.p95, seconds, "95 of 100 requests have theirs by then; a first-token target is held to it"],
  ["time per token, median", (s) => s.per_token?.median, seconds, "between tokens of one answer, on average over the answer; other users' prompts are read meanwhile"],
  ["time per token, 95th", (s) => s.per_token?.p95, seconds, "95 of 100 answers are at least as fast; a target of time per token is held to it"],
  ["whole request, median", (s) => s.request.median, seconds, "from arrival to the last token"],
  ["whole request, 95th", (s) => s.request.p95, seconds, "95 of 100 requests are finished by then"],
  ["requests at once", (s) => s.concurrency, (n) => digits(n), "on average over time"],
  ["cache used, mean", (s) => s.cache_used, share, "of the cache budget"],
  ["cache used, most", (s) => s.cache_most, share, "of the cache budget"],
  ["busy", (s) => s.busy, share, "of the time some step runs"],
  ["time on prompts", (s) => s.prefill_share, share, "of the busy time; the cost of prompts is this share of the hours"],
  ["prefill, 95th", (s) => s.pools?.prefill.p95, seconds, "of the time to first token: waiting for devices that prefill, and the prompt itself"],
  ["cache sent, 95th", (s) => s.pools?.transfer.p95, seconds, "of the time to first token: what is left to send when the prompt is computed, waiting for the links included"],
  ["wait for room, 95th", (s) => s.pools?.admission.p95, seconds, "from a first token until its sequence is decoded"],
  ["busy with prefill", (s) => s.pools?.prefill_busy, share, "of the time, of the pool that prefills"],
  ["busy sending", (s) => s.pools?.sending, share, "of the time, of the links out of the pool that prefills"],
  ["busy receiving", (s) => s.pools?.receiving, share, "of the time, of the links into the pool that decodes"],
  ["preemptions", (s) => s.preemptions, whole, "sequences that were dropped for want of cache and computed again, the newest first"],
];

function asked(w) {
  const tokens = `${digits(w.mean_input_tokens, 5)} tokens in, ${digits(w.mean_output_tokens, 5)} out`;
  const how = w.rate === null ? `${whole(w.users)} users, each sends its next request when the last is served` : `${digits(w.rate, 4)} requests/s (${w.arrivals})${w.users === null ? "" : `, at most ${whole(w.users)} at once`}`;
  return [tokens, how, w.prefix_share ? `${share(w.prefix_share)} of prompts cached` : "", w.drafts ? `${w.drafts} drafted, ${digits(w.acceptance)} accepted` : ""].filter(Boolean).join("; ");
}

export function workload(now, before, open) {
  const w = now.serve.workload, was = before && (before.serve.workload ?? {});
  const verdict = w.middle === null ? "✗ Its longest request does not fit" : w.middle.sustained ? "✓ Kept up" : w.middle.sustained === null ? "✗ Too few requests to tell whether their rate is kept up" : "✗ Requests pile up";
  return panel("Workload", "serve", open, { wide: Boolean(was), note: `Simulated: continuous batching in which a step decodes every sequence and fills the chunk with the oldest prompts; ${whole(w.middle?.simulated ?? 0)} requests, seed ${w.asked.seed}.` },
    el("p", {}, el("span", { class: w.middle?.sustained ? "yes" : "no" }, verdict), ` ${asked(w.asked)}`),
    el("div", { class: "scroll" }, el("table", {}, headed(was), el("tbody", {}, levels(SERVED, w, was, "workload")))));
}

export function cost(now, before, open) {
  const c = now.serve.cost, was = before && (before.serve.cost ?? {}), text = money(c.currency), price = now.serve.asked.price;
  const each = `${text(price.amount)} an hour for each of ${whole(devices(now.serve))} devices`;
  const split = now.serve.workload ? "the hour is divided between prompts and answers by the time that they take; idle time is paid too" : "devices that do nothing else";
  const rows = [
    ["one hour of all devices", (one) => one.hour, text, each],
    ["a million tokens of prompts", (one) => one.million_input, text, "price of the time in which so many are read", split],
    ["a million tokens of answers", (one) => one.million_output, text, "price of the time in which so many are written", split],
    ["a million tokens of both", (one) => one.million_tokens, text, "price of the time in which so many are read or written"],
  ];
  return panel("Cost", "serve", open, { wide: Boolean(was), note: now.serve.workload ? "Of the workload." : "Of prompts alone, and of full steps alone. With a workload it is that of the workload." },
    el("div", { class: "scroll" }, el("table", {}, headed(was), el("tbody", {}, levels(rows, c, was, "cost")))));
}

export function costs(now, before, open) {
  const points = (speeds) => (speeds ?? []).filter((one) => one.million_output).map((one) => [one.tokens_per_second_per_user, one.million_output]);
  const { middle, low, high } = now.curves.speeds, text = money(now.serve.cost.currency), old = points(before?.curves?.speeds.middle), fitting = now.serve.users_that_fit ?? 0;
  const dots = middle.map((one) => ({ class: one.batch <= fitting ? "dot" : "hollow", text: `batch ${one.batch}: ${text(one.million_output)} at ${digits(one.tokens_per_second_per_user, 4)} tokens/s of one user` }));
  const fits = middle.filter((one) => one.batch <= fitting).at(-1);
  const told = fits ? `${text(fits.million_output)} at a batch of ${whole(fits.batch)}, ${text(middle[0].million_output)} alone` : "no batch fits";
  return panel("Cost against speed per user", "curves", open, { note: `A million tokens of answers by batches of 1 to ${whole(middle.at(-1).batch)}, decoding alone: ${told}. Shaded from low to high efficiencies; filled: fits, hollow: does not.${old.length ? " Dashed: before." : ""}` },
    chart({ title: "Cost against speed per user", description: told, x: { name: "tokens/s of one user", text: (n) => digits(n) }, y: { name: "a million tokens", text },
      series: [...(old.length ? [{ class: "before", points: old }] : []), { class: "curve", points: points(middle), dots }], band: [...points(low), ...points(high).reverse()] }));
}

export function formats(now, open) {
  const rows = now.serve.by_format, contexts = now.curves.contexts;
  return panel("Users by format and context", "serve", open, { wide: true, note: "Sequences that fit, without targets. Beside them the cache of one, on a device." },
    el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "users by format and context" }, el("table", {}, head(["weights"], ["cache"], ["on a device", "n"], ...contexts.map((n) => [`${whole(n)} tokens`, "n"])),
      el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.weights), el("td", {}, row.cache), cell(bytes(row.weight_bytes)),
        row.users.map((n, i) => el("td", { class: "n" }, whole(n), el("small", {}, ` × ${bytes(row.user_bytes[i])}`)))))))));
}

export function layouts(now, open) {
  const found = now.serve.layouts, text = money(now.serve.asked.price?.currency ?? ""), priced = now.serve.asked.price;
  const rows = found.map((one) => el("tr", { "data-layout": one.options }, use("serving", { gpus: one.gpus, tp: one.tp, pp: one.pp, ep: one.ep > 1 ? one.ep : "", redundant_experts: one.redundant_experts || "" }, one.options), el("th", { scope: "row" }, el("code", {}, one.options)), cell(whole(one.gpus)), cell(whole(one.copies)), priced ? cell(text(one.hour)) : null,
    cell(digits(one.tokens_per_second, 4))));
  const note = `${whole(found.length)} of ${now.serve.machine} that serve what is asked within the targets, the cheapest first; expected tokens/s of the batch.`;
  if (!rows.length) return panel("Layouts for serving, ranked", "layouts", open, { wide: true }, el("p", { class: "no" }, "✗ None that was tried serves what is asked within the targets"));
  return panel("Layouts for serving, ranked", "layouts", open, { wide: true, note },
    el("div", { class: "scroll tall", tabindex: 0, role: "group", "aria-label": "layouts for serving" }, el("table", { class: "tree" },
      head(["", "use"], ["layout"], ["devices", "n"], ["copies", "n"], ...(priced ? [["an hour", "n"]] : []), ["tokens/s", "n"]), el("tbody", {}, rows))));
}
