// The page as one file: its documents stand in it, and what they show cannot be changed.
import { show, surround } from "./chrome.js";
import { $, el, fresh } from "./dom.js";
import { panels } from "./draw.js";
import { head, panel } from "./parts.js";

const about = JSON.parse($("about").textContent);

function table({ title, columns, rows }) {
  const right = columns.map((_, i) => rows.every((row) => /^[-–+−\d.,%]*$/.test(row[i])));
  const cells = (row) => row.map((text, i) => (i ? el("td", { class: right[i] ? "n" : "" }, text) : el("th", { scope: "row" }, text)));
  return panel(title, null, null, { wide: true },
    el("div", { class: "scroll" }, el("table", {}, head(...columns.map((name, i) => [name, right[i] ? "n" : ""])), el("tbody", {}, rows.map((row) => el("tr", {}, cells(row)))))));
}

function drawn(one, alone) {
  const texts = Object.fromEntries(Object.entries(one.documents).map(([kind, { id }]) => [kind, $(id).textContent]));
  const documents = Object.fromEntries(Object.entries(texts).map(([kind, text]) => [kind, JSON.parse(text)]));
  const of = { layouts: "serve", ranked: "train" }; // a command's document has its layouts too
  const open = (title, kind) => show(title, texts[of[kind] ?? kind], one.documents[of[kind] ?? kind].command);
  const made = [...one.tables.map(table), ...panels(documents, null, open)];
  if (alone) return made;
  const id = fresh(); // a panel is named after its plan too
  for (const section of made) section.setAttribute("aria-labelledby", `${id} ${section.getAttribute("aria-labelledby")}`);
  return [el("h2", { class: "case", id }, one.title), ...made];
}

const cases = about.cases;
surround();
$("question").textContent = cases[0].title;
$("status").after(el("p", { class: "note" }, el("code", {}, about.command), ` (asbuilt ${about.version}). Numbers can be changed on the page that `, el("code", {}, "asbuilt web"), " serves."));
$("panels").replaceChildren(...cases.flatMap((one) => drawn(one, cases.length === 1)));
document.body.dataset.drawn = "1";
