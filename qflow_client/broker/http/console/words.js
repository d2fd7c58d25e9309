// Formats numbers for people.
export const number = new Intl.NumberFormat("en");
export const whole = (value) => number.format(Math.round(value));
export const seconds = (value) => (value < 60 ? `${value.toFixed(1)} s` : `${whole(value)} s`);
export const many = (count, what) => `${number.format(count)} ${what}${count === 1 ? "" : "s"}`;
