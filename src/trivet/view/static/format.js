// Numbers and times as people read them.

/** `0.0123`, `1.23k`, `4.5e-6`: three or four digits that count. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return Number.isInteger(value) ? String(value) : trim(value);
}

function trim(value) {
  return String(Number(value.toPrecision(4)));
}

/** `41 ms`, `3.2 s`, `12 min`, `3 h 5 min`. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** `14:03:07` of a Unix time. */
export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function percent(share) {
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}
