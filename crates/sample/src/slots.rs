//! Slot text: `show click [name=value …] sign:slot sign:slot …`, fields separated by spaces or tabs.

use crate::batch::BatchBuilder;
use crate::parser::{LabelMode, NUMERIC_SLOTS, Parser, RecordError, check_first, check_labels, excerpt, parse_u64};

/// Parses a line into the current sample of `into`; returns (show, click).
#[inline]
pub(crate) fn parse(
    parser: &Parser,
    line: &[u8],
    mode: LabelMode,
    into: &mut BatchBuilder,
) -> Result<(u32, u32), RecordError> {
    let mut fields = Fields { rest: line };
    let (show, click) = match mode {
        LabelMode::Required => parse_counts(&mut fields, into)?,
        LabelMode::Ignored => {
            for name in ["show", "click"] {
                // The values are ignored, but a sign here means that the two fields are missing.
                match fields.next() {
                    Some(field) if !field.contains(&b':') => {}
                    field => {
                        let got = excerpt(field.unwrap_or_default());
                        return Err(RecordError(format!("{name}: expected `show click sign:slot …`, got `{got}`")));
                    }
                }
            }
            (1, 0)
        }
    };
    loop {
        if let Some((sign, number, length)) = plain_token(fields.rest) {
            fields.rest = &fields.rest[length..];
            if let Some(slot) = parser.numbered_slot(number) {
                parser.add_sign(slot, sign, into);
            }
            continue;
        }
        let Some(field) = fields.next() else { break };
        let Some(colon) = memchr::memrchr(b':', field) else {
            parse_label(parser, field, mode, show, into)?;
            continue;
        };
        let (sign, slot) = (&field[..colon], &field[colon + 1..]);
        let Some(sign) = parse_u64(sign) else {
            return Err(RecordError(format!("slot `{}`: sign `{}` is not a u64", excerpt(slot), excerpt(sign))));
        };
        if slot.is_empty() {
            return Err(RecordError(format!("sign `{sign}`: expected a slot after the colon, got nothing")));
        }
        if let Some(slot) = parser.slot(slot) {
            parser.add_sign(slot, sign, into);
        }
    }
    if mode == LabelMode::Required {
        check_labels(&parser.features().labels, into)?;
    }
    Ok((show, click))
}

/// Digits of the longest slot below [`NUMERIC_SLOTS`].
const MAX_SLOT_DIGITS: usize = 5;

/// Fast path for a field such as `17241709254077376921:12 ` at the start of `rest`: returns its sign, the number of its
/// slot, and its length including the separator. Returns `None` for anything else.
#[inline]
fn plain_token(rest: &[u8]) -> Option<(u64, usize, usize)> {
    let (sign, digits) = leading_u64(rest)?;
    if rest.get(digits) != Some(&b':') {
        return None;
    }
    let mut at = digits + 1;
    let mut number = 0;
    while at <= digits + MAX_SLOT_DIGITS + 1
        && let Some(digit) = rest.get(at).map(|byte| byte.wrapping_sub(b'0')).filter(|&digit| digit <= 9)
    {
        number = number * 10 + usize::from(digit);
        at += 1;
    }
    let slot_digits = at - digits - 1;
    let leads_with_zero = slot_digits > 1 && rest[digits + 1] == b'0';
    let canonical = (1..=MAX_SLOT_DIGITS).contains(&slot_digits) && !leads_with_zero && number < NUMERIC_SLOTS;
    let ends = matches!(rest.get(at), None | Some(b' ' | b'\t'));
    (canonical && ends).then_some((sign, number, at + usize::from(at < rest.len())))
}

/// Returns the decimal u64 at the start of `text` and its number of digits.
#[inline]
fn leading_u64(text: &[u8]) -> Option<(u64, usize)> {
    atoi_simd::parse_prefix_pos::<u64, false>(text).ok()
}

fn parse_counts(fields: &mut Fields<'_>, into: &mut BatchBuilder) -> Result<(u32, u32), RecordError> {
    let mut count = |name: &str| {
        let field = fields.next().unwrap_or_default();
        parse_u64(field)
            .and_then(|number| u32::try_from(number).ok())
            .ok_or_else(|| RecordError(format!("{name}: expected a count below 2^32, got `{}`", excerpt(field))))
    };
    let show = count("show")?;
    let click = count("click")?;
    if show == 0 {
        return Err(RecordError("show: expected at least 1, got 0".into()));
    }
    if click > show {
        return Err(RecordError(format!("click: expected at most show = {show}, got {click}")));
    }
    into.set_label(0, click as f32 / show as f32);
    Ok((show, click))
}

/// Parses a `name=value` field, which may be a label of the job.
fn parse_label(
    parser: &Parser,
    field: &[u8],
    mode: LabelMode,
    show: u32,
    into: &mut BatchBuilder,
) -> Result<(), RecordError> {
    let Some(equals) = memchr::memchr(b'=', field) else {
        return Err(RecordError(format!("expected `sign:slot`, got `{}`", excerpt(field))));
    };
    let (name, value) = (&field[..equals], &field[equals + 1..]);
    let label = parser.features().labels.iter().skip(1).position(|label| label.as_bytes() == name);
    let (Some(label), LabelMode::Required) = (label, mode) else {
        return Ok(());
    };
    check_first(&parser.features().labels[label + 1], label + 1, into)?;
    match parse_u64(value) {
        Some(count) if count <= u64::from(show) => {
            into.set_label(label + 1, count as f32 / show as f32);
            Ok(())
        }
        _ => Err(RecordError(format!(
            "label `{}`: expected a count of at most show = {show}, got `{}`",
            excerpt(name),
            excerpt(value)
        ))),
    }
}

/// The non-empty fields of a line.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Fields<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            if self.rest.is_empty() {
                return None;
            }
            let end = self.rest.iter().position(|&byte| byte == b' ' || byte == b'\t').unwrap_or(self.rest.len());
            let field = &self.rest[..end];
            self.rest = &self.rest[(end + 1).min(self.rest.len())..];
            if !field.is_empty() {
                return Some(field);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Batch, Features};

    proptest! {
        #[test]
        fn leading_numbers(number: u64, zeros in 0usize..4, rest in "[^0-9]{0,3}") {
            let text = format!("{}{number}", "0".repeat(zeros));
            let expected = (text.len() <= 20).then_some((number, text.len()));
            prop_assert_eq!(leading_u64(format!("{text}{rest}").as_bytes()), expected);
        }

        #[test]
        fn the_fast_path_agrees_with_the_slow_path(line in "1 0( [0-9x]{1,21}:(0|7|70000|007|70001|[0-9]{20,40}|[0-9u]{1,6})[ \t]{0,2}){0,4}") {
            let features = r#"{"format":"slots","hash":1,"slots":[{"name":"0","pooling":"sum"},{"name":"7","pooling":"sum"},
                {"name":"70000","pooling":"sum"},{"name":"007","pooling":"sum"}],"dense":[],"labels":["click"]}"#;
            let parser = Parser::new(Features::from_json(features).unwrap()).unwrap();
            let mut builder = parser.builder(1);
            let parsed = parser.parse_line(line.as_bytes(), LabelMode::Required, &mut builder).is_ok();
            let tokens: Option<Vec<(u16, u64)>> = line.split([' ', '\t']).filter(|field| !field.is_empty()).skip(2).map(|field| {
                let (sign, slot) = field.split_once(':').unwrap();
                parse_u64(sign.as_bytes()).map(|sign| (parser.slot(slot.as_bytes()).unwrap_or(u16::MAX), sign))
            }).collect();
            prop_assert_eq!(parsed, tokens.is_some());
            if let Some(mut tokens) = tokens {
                tokens.retain(|&(slot, _)| slot != u16::MAX);
                tokens.sort_by_key(|&(slot, _)| slot);
                prop_assert_eq!(builder.finish().signs, tokens.into_iter().map(|(_, sign)| sign).collect::<Vec<_>>());
            }
        }
    }

    fn parse_lines(labels: &str, mode: LabelMode, lines: &[&str]) -> Result<Batch, String> {
        let features = format!(
            r#"{{"format":"slots","hash":1,"slots":[{{"name":"0","pooling":"sum"}},{{"name":"7","pooling":"sum"}},
            {{"name":"user","pooling":"sum"}}],"dense":[],"labels":{labels}}}"#
        );
        let parser = Parser::new(Features::from_json(&features).unwrap()).unwrap();
        let mut builder = parser.builder(lines.len());
        for line in lines {
            parser.parse_line(line.as_bytes(), mode, &mut builder).map_err(|error| error.to_string())?;
        }
        Ok(builder.finish())
    }

    fn error_of(line: &str) -> String {
        parse_lines(r#"["click"]"#, LabelMode::Required, &[line]).unwrap_err()
    }

    #[test]
    fn signs_are_in_their_slots_and_other_slots_are_ignored() {
        let lines = ["1 0 17241709254077376921:0 5:7 6:7 9:12", "4 1\t8:user  5:0 "];
        let batch = parse_lines(r#"["click"]"#, LabelMode::Required, &lines).unwrap();
        assert_eq!(batch.signs, [17_241_709_254_077_376_921, 5, 6, 5, 8]);
        assert_eq!(batch.offsets, [0, 1, 3, 3, 4, 4, 5]);
        assert_eq!(batch.labels, [0.0, 0.25]);
        assert_eq!((batch.shows, batch.clicks), (vec![1, 4], vec![0, 1]));
    }

    #[test]
    fn further_labels_are_named_fields() {
        let batch = parse_lines(r#"["click","buy"]"#, LabelMode::Required, &["2 2 buy=1 other=x 5:0"]).unwrap();
        assert_eq!(batch.labels, [1.0, 0.5]);
        let error = |line| parse_lines(r#"["click","buy"]"#, LabelMode::Required, &[line]).unwrap_err();
        assert_eq!(error("1 1 5:0"), "label `buy`: expected one value, got none");
        assert_eq!(error("1 1 buy=0 buy=1 5:0"), "label `buy`: expected one value, got two");
        assert_eq!(error("1 1 buy=2 5:0"), "label `buy`: expected a count of at most show = 1, got `2`");
        let three = parse_lines(r#"["click","buy","cart"]"#, LabelMode::Required, &["1 1 buy=0 buy=1 5:0"]);
        assert_eq!(three.unwrap_err(), "label `buy`: expected one value, got two");
    }

    #[test]
    fn labels_are_ignored_when_predicting() {
        let batch = parse_lines(r#"["click","buy"]"#, LabelMode::Ignored, &["- - 5:0", "0 0"]).unwrap();
        assert_eq!(batch.signs, [5]);
        assert_eq!(batch.shows, [1, 1]);
        let error = |line| parse_lines(r#"["click"]"#, LabelMode::Ignored, &[line]).unwrap_err();
        assert_eq!(error("5:0 6:7"), "show: expected `show click sign:slot …`, got `5:0`");
        assert_eq!(error("1 5:0 6:7"), "click: expected `show click sign:slot …`, got `5:0`");
    }

    #[test]
    fn bad_lines_are_errors() {
        assert_eq!(error_of("1 0 abx:7"), "slot `7`: sign `abx` is not a u64");
        assert_eq!(error_of("1 0 18446744073709551616:7"), "slot `7`: sign `18446744073709551616` is not a u64");
        assert_eq!(error_of("1 2 5:7"), "click: expected at most show = 1, got 2");
        assert_eq!(error_of("0 0 5:7"), "show: expected at least 1, got 0");
        assert_eq!(error_of("1"), "click: expected a count below 2^32, got ``");
        assert_eq!(error_of("1 0 5"), "expected `sign:slot`, got `5`");
        assert_eq!(error_of("1 0 5:"), "sign `5`: expected a slot after the colon, got nothing");
        assert_eq!(error_of("4294967296 0 5:7"), "show: expected a count below 2^32, got `4294967296`");
    }
}
