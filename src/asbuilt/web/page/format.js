// Figures as text. Nothing is computed here but the unit in which a figure is written.
const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export const whole = (n) => Math.round(n).toLocaleString("en-US");

export function digits(value, most = 3) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 10 ** (most - 1)) return whole(value);
  return Number(value.toPrecision(most)).toLocaleString("en-US", { maximumFractionDigits: 12 });
}

export function scaled(value, unit) {
  const [size, prefix] = PREFIXES.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return `${digits(value / size)} ${prefix}${unit}`;
}

export function count(n) {
  if (Math.abs(n) < 1e5) return whole(n);
  const [size, name] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([least]) => Math.abs(n) >= least) ?? [1, ""];
  return name ? `${digits(n / size, 4)}${name}` : whole(n);
}

export const bytes = (n) => (Math.abs(n) < 1000 ? `${whole(n)} B` : scaled(n, "B"));

export function seconds(s) {
  if (s >= 1) return `${digits(s)} s`;
  return s >= 1e-3 ? `${digits(s * 1e3)} ms` : `${digits(s * 1e6)} µs`;
}

export const share = (part) => `${digits(part * 100)}%`;

export const money = (currency) => (amount) => `${currency}${/^[A-Z]{3}$/.test(currency) ? " " : ""}${digits(amount)}`;

export const plain = (value) =>
  typeof value === "number" ? (Number.isInteger(value) ? whole(value) : digits(value, 6)) : String(value);

export function difference(before, after) {
  if (typeof before !== "number" || typeof after !== "number" || before === after) return "";
  if (before === 0) return "new";
  const part = (after / before - 1) * 100;
  return Math.abs(part) < 0.05 ? "<0.1%" : `${part > 0 ? "+" : "−"}${digits(Math.abs(part), Math.abs(part) < 1 ? 1 : 3)}%`;
}
