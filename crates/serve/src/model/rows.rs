//! The rows of a version: in this process or in a store.

use std::sync::Arc;
use std::time::Instant;

use elasticrec_cube::client::{LookupSummary, ShardFailurePolicy};
use elasticrec_cube::{Client, ClientError, View, presence_of};

/// The rows of a version.
pub enum Rows {
    /// In this process.
    Held(View),
    /// In a store.
    Store(StoreRows),
}

/// The rows of a version in a store.
pub struct StoreRows {
    client: Arc<Client>,
    version: u64,
    width: usize,
    policy: ShardFailurePolicy,
}

/// Rows in the order of their signs; signs without a row have zeros.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct FoundRows {
    pub(crate) width: usize,
    pub(crate) values: Vec<f32>,
    /// Whether each sign has a row.
    pub(crate) present: Vec<bool>,
}

impl StoreRows {
    /// Opens a version that all shards have; `policy` applies to signs whose shard does not answer.
    pub fn new(client: Arc<Client>, version: u64, policy: ShardFailurePolicy) -> Result<StoreRows, ClientError> {
        let width = client.layout(version)?.width();
        Ok(StoreRows { client, version, width, policy })
    }

    /// Returns the layout of a row.
    pub(crate) fn layout(&self) -> Result<Arc<elasticrec_cube::client::Layout>, ClientError> {
        self.client.layout(self.version)
    }

    /// Returns the number of values in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Writes the row of each sign to `out`, `[signs, width]`, zeros for signs without a row. `present` is a reusable
    /// buffer.
    pub fn look_up(
        &self,
        signs: &[u64],
        out: &mut [f32],
        present: &mut Vec<bool>,
        deadline: Option<Instant>,
    ) -> Result<LookupSummary, ClientError> {
        present.clear();
        present.resize(signs.len(), false);
        let latest = Instant::now() + self.client.timeout();
        let until = deadline.map_or(latest, |deadline| deadline.min(latest));
        self.client.lookup_until(self.version, signs, until, self.policy)?.wait(out, present)
    }
}

impl Rows {
    /// Returns the number of values in a row.
    pub fn width(&self) -> usize {
        match self {
            Rows::Held(view) => view.width(),
            Rows::Store(store) => store.width,
        }
    }

    /// Returns the rows in this process, or None if they are in a store.
    pub fn held(&self) -> Option<&View> {
        match self {
            Rows::Held(view) => Some(view),
            Rows::Store(_) => None,
        }
    }

    /// Returns the rows of `signs`, and which signs have one. A shard that is down is an error, whatever the policy.
    pub(crate) fn find(&self, signs: &[u64]) -> Result<FoundRows, ClientError> {
        let width = self.width();
        let mut values = vec![0.0; signs.len() * width];
        let present = match self {
            Rows::Held(view) => {
                let mut bits = vec![0; signs.len().div_ceil(64)];
                view.find(signs, &mut bits);
                view.lookup(signs, &mut values);
                presence_of(&bits, signs.len())
            }
            Rows::Store(StoreRows { client, version, .. }) => {
                let mut present = vec![false; signs.len()];
                client.get(*version, signs, &mut values, &mut present)?;
                present
            }
        };
        Ok(FoundRows { width, values, present })
    }
}
