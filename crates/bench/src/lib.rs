//! Measurements and traffic generators for `elasticrec bench`. No product crate depends on this one.

pub mod cube;
pub mod engine;
mod keys;
mod memory;
pub mod store;
pub mod table;
mod timing;
pub mod traffic;
