// Asks this page's server. An answer that has not changed is not sent again.

const known = new Map();
const MAX_KNOWN = 60;

/** The answer of `/api/route?query`, and whether it differs from the last one. Throws an Error with the server's words. */
export async function ask(route, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const url = `/api/${route}?${new URLSearchParams(given)}`;
  const earlier = known.get(url);
  const response = await fetch(url, { headers: earlier ? { "If-None-Match": earlier.tag } : {}, cache: "no-store" });
  if (response.status === 304 && earlier) return { data: earlier.data, isNew: false };
  const data = await response.json();
  if (!response.ok) throw new Error(data.error ?? `${route}: ${response.status}`);
  known.delete(url);
  known.set(url, { tag: response.headers.get("ETag"), data });
  if (known.size > MAX_KNOWN) known.delete(known.keys().next().value);
  return { data, isNew: true };
}
