// Formatting of numbers, times and words.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 10 ? count.toFixed(1) : Math.round(count)} ${UNITS[unit]}`;
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}

// Formats a metric with four significant digits. NaN and infinities arrive as null.
export function metric(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 4);
}

export function rate(perSecond) {
  return perSecond >= 10 ? count(perSecond) : perSecond.toFixed(1);
}

export function seconds(value) {
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return duration(value);
}

export function duration(value) {
  const whole = Math.max(0, Math.round(value));
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function clock(time) {
  return new Date(time * 1e3).toLocaleTimeString("en-GB");
}

export function moment(time) {
  const at = new Date(time * 1e3);
  const today = at.toDateString() === new Date().toDateString();
  if (today) return clock(time);
  const digits = (number) => String(number).padStart(2, "0");
  return `${at.getFullYear()}-${digits(at.getMonth() + 1)}-${digits(at.getDate())} ${clock(time)}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// Formats the metrics of an evaluation, such as "accuracy 0.9712".
export function metrics(values) {
  return Object.entries(values)
    .map(([name, value]) => `${name} ${metric(value)}`)
    .join(", ");
}

// The number of complete epochs in the account of a job's data, whose `epoch` is the last one if all are complete.
export function epochsDone({ samples, epochs, epoch, total }) {
  return total.done >= samples * epochs ? epochs : epoch;
}
