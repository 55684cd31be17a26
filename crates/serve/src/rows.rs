//! Where the rows of a version are: in this process, or at the shards of a store.

use std::sync::Arc;
use std::time::Instant;

use elasticrec_cube::client::{Lost, Sought};
use elasticrec_cube::{Client, ClientError, View};

/// The rows of a version.
pub enum Rows {
    /// In this process.
    Held(View),
    /// At the shards of a store, which is asked for this version by name.
    Store(StoreRows),
}

/// Rows of a version at a store.
pub struct StoreRows {
    client: Arc<Client>,
    version: u64,
    width: usize,
    lost: Lost,
}

impl StoreRows {
    /// The version at all shards; `lost` is what becomes of signs whose shard gives no answer.
    pub fn new(client: Arc<Client>, version: u64, lost: Lost) -> Result<StoreRows, ClientError> {
        let width = client.layout(version)?.width();
        Ok(StoreRows { client, version, width, lost })
    }

    /// (name, width) of the columns.
    pub(crate) fn layout(&self) -> Result<Arc<elasticrec_cube::client::Layout>, ClientError> {
        self.client.layout(self.version)
    }
}

impl Rows {
    /// Values in a row.
    pub fn width(&self) -> usize {
        match self {
            Rows::Held(view) => view.width(),
            Rows::Store(store) => store.width,
        }
    }

    /// The view, where rows are in this process.
    pub fn held(&self) -> Option<&View> {
        match self {
            Rows::Held(view) => Some(view),
            Rows::Store(_) => None,
        }
    }

    /// Writes the row of each sign to `out`, `[signs, width]`, zeros for those without one. `present` is scratch.
    pub fn look_up(
        &self,
        signs: &[u64],
        out: &mut [f32],
        present: &mut Vec<bool>,
        deadline: Option<Instant>,
    ) -> Result<Sought, ClientError> {
        match self {
            Rows::Held(view) => Ok(Sought { hits: view.lookup(signs, out), lost: 0 }),
            Rows::Store(StoreRows { client, version, lost, .. }) => {
                present.clear();
                present.resize(signs.len(), false);
                let patience = Instant::now() + client.timeout();
                let until = deadline.map_or(patience, |deadline| deadline.min(patience));
                client.ask_until(*version, signs, until, *lost)?.wait(out, present)
            }
        }
    }
}
