// uPlot formats numbers in the browser's language as soon as it is loaded. It fails if that is no language: a Chromium in the
// locale C or POSIX calls it `en-US@posix`.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
