// Numbers, times and states in words.

export const STATES = {
  starting: { word: "starting", live: true, rank: 0 },
  training: { word: "training", live: true, rank: 0 },
  stopping: { word: "stopping", live: true, rank: 0 },
  finished: { word: "finished", rank: 1 },
  interrupted: { word: "interrupted", rank: 2 },
  killed: { word: "killed", rank: 2 },
  failed: { word: "failed", rank: 2 },
  diverged: { word: "diverged", rank: 2 },
};

export const isLive = (row) => Boolean(STATES[row.state]?.live);

export function clock(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const two = (n) => String(n).padStart(2, "0");
  if (s < 3600) return `${Math.floor(s / 60)}:${two(s % 60)}`;
  if (s < 86400) return `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function ago(seconds) {
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  if (seconds < 60 * 86400) return `${Math.floor(seconds / 86400)} d ago`;
  return new Date(Date.now() - seconds * 1000).toISOString().slice(0, 10);
}

export function headline(row) {
  if (!row.last) return "";
  if (row.last.mean === null) return row.state === "diverged" ? "diverged" : "no value";
  return `${spread(row.last.mean, row.last.sd, row.decimals)} ${row.unit}`.trim();
}

// Rounds done in all, in words: seeds may train together or one after the other.
export function progress(row) {
  const total = row.rounds * row.seeds.length;
  const share = row.done.reduce((a, b) => a + b, 0) / total;
  const at = row.done.findIndex((n) => n < row.rounds);
  const together = row.done.every((n) => Math.abs(n - row.done[0]) <= 1);
  let text = `${Math.min(...row.done)}/${row.rounds}`;
  if (!together && at >= 0 && row.seeds.length > 1) {
    text = `${row.done[at]}/${row.rounds} · seed ${at + 1} of ${row.seeds.length}`;
  }
  return { share: row.state === "finished" ? 1 : share, text };
}

// What has happened to a run, as a sentence.
export function story(row) {
  const round = Math.max(...row.done);
  const after = round ? `after round ${round} of ${row.rounds}` : "before its first round ended";
  const reason = row.reason.replace(/^(interrupted|failed): /, "");
  switch (row.state) {
    case "starting": return "It is starting: no round has ended yet.";
    case "training": return "It is training.";
    case "stopping": return "It stops once its round is complete and saved.";
    case "finished":
      return row.done.some((n) => n < row.rounds) ? "It stopped early, by its validation data." : "It is complete.";
    case "interrupted": return `It was interrupted ${after}, and saved.`;
    case "killed": return `Its process was killed ${after}. It goes on from its last checkpoint.`;
    case "failed": return `It failed: ${reason}`;
    case "diverged": return `It has diverged. ${reason}`.trim();
    default: return row.state;
  }
}

export function p(value) {
  if (!finite(value)) return "";
  return value < 0.001 ? "< 0.001" : value.toFixed(3);
}
