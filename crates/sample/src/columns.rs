//! Columns to a batch: rows of a Parquet file, and values from a user's own reader.

use crate::batch::BatchBuilder;
use crate::csv::split_values;
use crate::parser::{LabelMode, Parser, RecordError};

/// The values of one slot, in the layout of Arrow's large lists of large strings.
#[derive(Debug, Clone, Copy)]
pub struct SlotColumn<'a> {
    /// Index of the first value of each row, and one more at the end; `None` if each row has exactly one value.
    pub rows: Option<&'a [i64]>,
    /// Offset of each value in `text`, and one more at the end.
    pub values: &'a [i64],
    /// The text of all values.
    pub text: &'a [u8],
}

/// A column of numbers.
#[derive(Debug, Clone, Copy)]
pub struct NumberColumn<'a> {
    /// One number per row.
    pub values: &'a [f32],
    /// Whether the number of each row is missing.
    pub nulls: Option<&'a [bool]>,
}

impl NumberColumn<'_> {
    fn get(&self, row: usize) -> Option<f32> {
        self.nulls.is_none_or(|nulls| !nulls[row]).then(|| self.values[row])
    }
}

/// Columns of equal length, in the order of the features.
#[derive(Debug, Clone)]
pub struct ColumnBatch<'a> {
    /// Number of rows.
    pub num_rows: usize,
    /// One for each slot.
    pub slots: Vec<SlotColumn<'a>>,
    /// One for each dense column.
    pub dense: Vec<NumberColumn<'a>>,
    /// One for each label.
    pub labels: Vec<NumberColumn<'a>>,
    /// The weight of each row.
    pub weights: Option<NumberColumn<'a>>,
}

impl ColumnBatch<'_> {
    /// Checks that every column has `num_rows` rows and that every offset is inside its text.
    pub fn check(&self, parser: &Parser) -> Result<(), String> {
        let features = parser.features();
        let numbers = self.dense.iter().chain(&self.labels).chain(&self.weights);
        let wrong_number = numbers.clone().any(|column| {
            column.values.len() != self.num_rows || column.nulls.is_some_and(|nulls| nulls.len() != self.num_rows)
        });
        let is_rising = |offsets: &[i64], end: usize| {
            offsets.first().is_none_or(|&first| first >= 0)
                && offsets.is_sorted()
                && offsets.last().is_none_or(|&last| last as usize <= end)
        };
        let wrong_slot = self.slots.iter().any(|slot| {
            let num_values = slot.values.len().saturating_sub(1);
            let rows_fit = match slot.rows {
                Some(rows) => rows.len() == self.num_rows + 1 && is_rising(rows, num_values),
                None => num_values == self.num_rows,
            };
            !rows_fit || !is_rising(slot.values, slot.text.len())
        });
        if wrong_number || wrong_slot {
            return Err(format!(
                "columns: expected {} rows in each column and offsets in range, got other lengths or offsets",
                self.num_rows
            ));
        }
        let (got, expected) =
            ((self.slots.len(), self.dense.len()), (features.read_slots().len(), features.dense.len()));
        if got != expected {
            let text = |(slots, dense): (usize, usize)| format!("{slots} slots and {dense} dense columns");
            return Err(format!("columns: expected {}, got {}", text(expected), text(got)));
        }
        Ok(())
    }

    /// Adds a row to the batch; a bad row adds nothing.
    pub fn add_row(
        &self,
        parser: &Parser,
        row: usize,
        mode: LabelMode,
        into: &mut BatchBuilder,
    ) -> Result<(), RecordError> {
        let features = parser.features();
        into.begin();
        for (index, slot) in self.slots.iter().enumerate() {
            let range = slot.rows.map_or(row..row + 1, |rows| rows[row] as usize..rows[row + 1] as usize);
            let separator = features.slots[index].separator.as_ref().map(String::as_bytes);
            for value in range {
                let text = &slot.text[slot.values[value] as usize..slot.values[value + 1] as usize];
                add_text(parser, index as u16, text, separator, into);
            }
        }
        for (index, column) in self.dense.iter().enumerate() {
            if let Some(value) = column.get(row) {
                parser.set_dense(index, value, into)?;
            }
        }
        let (mut click, mut weight) = (0, 1.0);
        if mode == LabelMode::Required {
            for (index, column) in self.labels.iter().enumerate() {
                let label = column.get(row).filter(|label| (0.0..=1.0).contains(label)).ok_or_else(|| {
                    let got = column.get(row).map_or("nothing".to_owned(), |label| label.to_string());
                    RecordError(format!("label `{}`: expected a number from 0 to 1, got {got}", features.labels[index]))
                })?;
                into.set_label(index, label);
                click = if index == 0 { u32::from(label >= 0.5) } else { click };
            }
            if let Some(weights) = &self.weights {
                weight = weights.get(row).filter(|weight| *weight > 0.0 && weight.is_finite()).ok_or_else(|| {
                    let got = weights.get(row).map_or("nothing".to_owned(), |weight| weight.to_string());
                    RecordError(format!("weight: expected a number above 0, got {got}"))
                })?;
            }
        }
        into.end_weighted(1, click, weight);
        Ok(())
    }
}

/// Adds the value or values of a text to a slot; null texts add nothing.
pub fn add_text(parser: &Parser, slot: u16, text: &[u8], separator: Option<&[u8]>, into: &mut BatchBuilder) {
    let nulls = parser.features().columns.as_ref().map_or(&[][..], |columns| &columns.null);
    let is_null = |text: &[u8]| text.is_empty() || nulls.iter().any(|null| null.as_bytes() == text);
    if is_null(text) {
        return;
    }
    match separator {
        None => parser.add_value(slot, text, into),
        Some(separator) => {
            for value in split_values(text, separator).filter(|value| !value.is_empty()) {
                parser.add_value(slot, value, into);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Features;
    use crate::hash::{sign_of, slot_seed};

    fn parser() -> Parser {
        let json = r#"{"format":"parquet","hash":1,"slots":[{"name":"a","pooling":"sum"},
            {"name":"b","pooling":"sum","separator":"|"}],"dense":[{"name":"d","normalize":{"kind":"none"}}],
            "labels":["click"],"columns":{"null":["NA"]}}"#;
        Parser::new(Features::from_json(json).unwrap()).unwrap()
    }

    fn columns() -> ColumnBatch<'static> {
        ColumnBatch {
            num_rows: 3,
            slots: vec![
                SlotColumn { rows: None, values: &[0, 1, 3, 3], text: b"xNA" },
                SlotColumn { rows: Some(&[0, 2, 2, 3]), values: &[0, 3, 4, 5], text: b"p|qrs" },
            ],
            dense: vec![NumberColumn { values: &[1.5, 0.0, f32::NAN], nulls: Some(&[false, true, false]) }],
            labels: vec![NumberColumn { values: &[1.0, 0.0, 0.0], nulls: None }],
            weights: None,
        }
    }

    #[test]
    fn rows_become_samples() {
        let parser = parser();
        let columns = columns();
        columns.check(&parser).unwrap();
        let mut builder = parser.builder(3);
        columns.add_row(&parser, 0, LabelMode::Required, &mut builder).unwrap();
        columns.add_row(&parser, 1, LabelMode::Required, &mut builder).unwrap();
        let error = columns.add_row(&parser, 2, LabelMode::Required, &mut builder).unwrap_err().to_string();
        assert_eq!(error, "dense `d`: expected a finite number, got NaN");
        let batch = builder.finish();
        let sign = |slot, value: &str| sign_of(slot_seed(slot), value.as_bytes());
        assert_eq!(batch.signs, [sign("a", "x"), sign("b", "p"), sign("b", "q"), sign("b", "r")]);
        assert_eq!(batch.offsets, [0, 1, 4, 4, 4]);
        assert_eq!((batch.dense, batch.clicks), (vec![1.5, 0.0], vec![1, 0]));
    }

    #[test]
    fn invalid_labels_are_errors() {
        let parser = parser();
        let mut columns = columns();
        columns.labels = vec![NumberColumn { values: &[2.0, 0.0, 0.0], nulls: Some(&[false, true, false]) }];
        let error = |row| columns.add_row(&parser, row, LabelMode::Required, &mut parser.builder(1)).unwrap_err();
        assert_eq!(error(0).to_string(), "label `click`: expected a number from 0 to 1, got 2");
        assert_eq!(error(1).to_string(), "label `click`: expected a number from 0 to 1, got nothing");
        assert!(columns.add_row(&parser, 1, LabelMode::Ignored, &mut parser.builder(1)).is_ok());
    }

    #[test]
    fn offsets_outside_the_text_are_rejected() {
        let parser = parser();
        let mut columns = columns();
        columns.slots[0].values = &[0, 1, 3, 9];
        assert!(columns.check(&parser).is_err());
        columns.slots[0].values = &[0, 3, 1, 3];
        assert!(columns.check(&parser).is_err());
        columns.slots[0].values = &[0, 1, 3];
        assert!(columns.check(&parser).is_err());
    }
}
