//! The sequence of the demo data: the shown item, and the history of items that the user looked at before.
//!
//! Items belong to hidden categories. In half of the samples one to three items of the history match, that is, have the
//! category of the shown item; the other items have one of a few categories that the user likes. More matches make a
//! click more likely. All categories match equally often, the number of matches does not depend on the length of the
//! history, and no single sign tells it: a linear model cannot see it, and the mean of the history blurs it. Categories
//! also have linear effects. Without them only the matches would distinguish the categories, and a network might not
//! learn to.

use super::column::{AliasEntry, alias_table, below, pick, sign_of, zipf_shares};
use super::random::{Stream, mix};

const NUM_CATEGORIES: u32 = 6;
const CATEGORY_ITEMS: u32 = 16;
const ZIPF: f64 = 1.05;
const NUM_INTERESTS: u32 = 3;
const MIN_LENGTH: u32 = 4;
/// The job that is written beside the data has the same limit.
const MAX_HISTORY: u32 = 12;
/// Probability of 0 to 3 matches, in sixteenths.
const MATCH_SIXTEENTHS: [u32; 4] = [8, 3, 3, 2];
/// Effect of 0 to 3 matches; the mean is zero.
const MATCH_EFFECTS: [f64; 4] = [-1.5, 1.0, 1.6, 2.1];
const ITEM_STD: f64 = 0.3;
/// Categories lie on a circle, so that the linear effects distinguish all of them. One axis is the linear effect of a
/// shown item; the other is the linear effect of a history, the mean over its items.
const CIRCLE: [[f64; 2]; NUM_CATEGORIES as usize] =
    [[1.0, 0.0], [0.5, 0.866], [-0.5, 0.866], [-1.0, 0.0], [-0.5, -0.866], [0.5, -0.866]];
const RADIUS: f64 = 1.1;
/// Slot number for the signs of items; no numbered slot has it.
const ITEM_SIGNS: u32 = u32::MAX - 1;

/// The effects and the text of an item, both shown and in a history.
struct Item {
    shown_effect: f64,
    history_effect: f64,
    shown_text: String,
    history_text: String,
}

/// All items, ordered by category.
pub(super) struct Items {
    items: Vec<Item>,
    alias_table: Vec<AliasEntry>,
}

/// The effects of an item and a history on the logit.
pub(super) struct DrawnItems {
    pub(super) linear: f64,
    pub(super) matches: f64,
}

impl Items {
    pub(super) fn new(seed: u64) -> Self {
        let mut categories = CIRCLE;
        let mut stream = Stream::new(mix(seed), 0);
        for at in (1..categories.len()).rev() {
            categories.swap(at, below(stream.next(), at as u32 + 1) as usize);
        }
        let items = (0..NUM_CATEGORIES * CATEGORY_ITEMS)
            .map(|value| {
                let sign = sign_of(ITEM_SIGNS, value);
                let [shown, history] = categories[(value / CATEGORY_ITEMS) as usize];
                Item {
                    shown_effect: RADIUS * shown + ITEM_STD * Stream::new(seed, sign).bell(),
                    history_effect: RADIUS * history,
                    shown_text: format!(" {sign}:item"),
                    history_text: format!(" {sign}:history"),
                }
            })
            .collect();
        Self { items, alias_table: alias_table(&zipf_shares(CATEGORY_ITEMS, ZIPF)) }
    }

    /// Draws and writes an item and a history.
    pub(super) fn draw(&self, stream: &mut Stream, out: &mut Vec<u8>) -> DrawnItems {
        let category = below(stream.next(), NUM_CATEGORIES);
        let shown = self.pick(category, stream);
        out.extend_from_slice(shown.shown_text.as_bytes());
        let mut linear = shown.shown_effect;
        let num_matches = draw_num_matches(stream);
        let length = MIN_LENGTH + below(stream.next(), MAX_HISTORY - MIN_LENGTH + 1);
        let interests = draw_interests(category, stream);
        let mut matches_left = num_matches;
        for left in (1..=length).rev() {
            // Matches are spread evenly: each remaining position gets one with probability matches_left / left.
            let category = if below(stream.next(), left) < matches_left {
                matches_left -= 1;
                category
            } else {
                interests[below(stream.next(), NUM_INTERESTS) as usize]
            };
            let item = self.pick(category, stream);
            out.extend_from_slice(item.history_text.as_bytes());
            linear += item.history_effect / f64::from(length);
        }
        DrawnItems { linear, matches: MATCH_EFFECTS[num_matches as usize] }
    }

    fn pick(&self, category: u32, stream: &mut Stream) -> &Item {
        &self.items[category as usize * CATEGORY_ITEMS as usize + pick(&self.alias_table, stream)]
    }
}

fn draw_num_matches(stream: &mut Stream) -> u32 {
    let mut sixteenth = below(stream.next(), 16);
    let mut num_matches = 0;
    while sixteenth >= MATCH_SIXTEENTHS[num_matches] {
        sixteenth -= MATCH_SIXTEENTHS[num_matches];
        num_matches += 1;
    }
    num_matches as u32
}

/// Draws different categories other than that of the shown item.
fn draw_interests(shown: u32, stream: &mut Stream) -> [u32; NUM_INTERESTS as usize] {
    let mut others = [0; NUM_CATEGORIES as usize - 1];
    for (other, category) in others.iter_mut().zip((0..NUM_CATEGORIES).filter(|&category| category != shown)) {
        *other = category;
    }
    let mut interests = [0; NUM_INTERESTS as usize];
    for (taken, interest) in interests.iter_mut().enumerate() {
        let at = taken + below(stream.next(), (others.len() - taken) as u32) as usize;
        others.swap(taken, at);
        *interest = others[taken];
    }
    interests
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_have_mean_zero_and_are_counted_correctly() {
        let mean: f64 =
            MATCH_SIXTEENTHS.iter().zip(MATCH_EFFECTS).map(|(&share, effect)| f64::from(share) * effect / 16.0).sum();
        assert!(mean.abs() < 1e-9, "{mean}");
        let items = Items::new(3);
        let category_of = |text: &str| {
            let at = items.items.iter().position(|item| item.shown_text.contains(text)).unwrap();
            at as u32 / CATEGORY_ITEMS
        };
        let mut lengths = [0; MAX_HISTORY as usize + 1];
        for index in 0..2000 {
            let mut line = Vec::new();
            let drawn = items.draw(&mut Stream::new(3, index), &mut line);
            let line = String::from_utf8(line).unwrap();
            let (mut shown, mut history) = (Vec::new(), Vec::new());
            for field in line.split_whitespace() {
                let (sign, slot) = field.split_once(':').unwrap();
                if slot == "item" { shown.push(category_of(sign)) } else { history.push(category_of(sign)) }
            }
            let num_matches = history.iter().filter(|&&category| category == shown[0]).count();
            assert_eq!((shown.len(), drawn.matches), (1, MATCH_EFFECTS[num_matches]));
            history.sort_unstable();
            history.dedup();
            assert!(history.len() <= 1 + NUM_INTERESTS as usize);
            lengths[line.split_whitespace().count() - 1] += 1;
        }
        assert!(lengths[..MIN_LENGTH as usize].iter().all(|&count| count == 0));
        assert!(lengths[MIN_LENGTH as usize..].iter().all(|&count| count > 50), "{lengths:?}");
    }
}
