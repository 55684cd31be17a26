//! Measurements and traffic for `elasticrec bench`.

pub(crate) mod cube;
pub(crate) mod serve;
pub(crate) mod store;
pub(crate) mod table;
