//! The models of a server by name, each with one or more variants, and the version that answers a request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::queue::deployment::Deployment;
use crate::refusal::Refusal;

/// A model of the server's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPlan {
    /// The name that requests use.
    pub name: String,
    /// Its variants; a single variant needs no name.
    pub variants: Vec<VariantPlan>,
}

/// A variant of a model's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct VariantPlan {
    /// Its name in answers; empty for a single variant.
    pub name: String,
    /// Its share of the requests, relative to the other variants.
    pub weight: f64,
}

/// The reason the models of a configuration are invalid.
#[derive(Debug, Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum PlanError {
    #[error("models: expected at least one, got none")]
    NoModels,
    #[error("model `{0}`: given twice")]
    Twice(String),
    #[error("model `{model}`: variants: {what}")]
    Variants { model: String, what: String },
    #[error("model `{model}`: no variant `{variant}`")]
    NoVariant { model: String, variant: String },
    #[error("no model `{0}`")]
    NoModel(String),
}

/// The models of a server, fixed when it starts. Their versions change.
pub(crate) struct Registry {
    models: BTreeMap<String, Entry>,
    /// The first model of the configuration, which answers requests that name none.
    first: String,
}

/// A model.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) variants: Vec<Variant>,
    /// Number of requests without a key so far.
    num_keyless: AtomicU64,
    seed: u64,
}

/// A variant of a model, and the version that its new requests get.
pub(crate) struct Variant {
    pub(crate) name: String,
    /// The end of its share of the keys, in [0, 1].
    end: f64,
    current: RwLock<Option<Arc<Deployment>>>,
}

/// The choice of a version by a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Choice<'a> {
    /// The model; None for the first one.
    pub(crate) model: Option<&'a str>,
    /// A variant by name, regardless of its weight.
    pub(crate) variant: Option<&'a str>,
    /// Requests with the same key get the same variant.
    pub(crate) key: Option<&'a [u8]>,
    /// The version that the current one must be.
    pub(crate) version: Option<u64>,
}

impl Registry {
    pub(crate) fn new(plans: &[ModelPlan]) -> Result<Registry, PlanError> {
        let first = plans.first().ok_or(PlanError::NoModels)?.name.clone();
        let mut models = BTreeMap::new();
        for plan in plans {
            if models.insert(plan.name.clone(), Entry::new(plan)?).is_some() {
                return Err(PlanError::Twice(plan.name.clone()));
            }
        }
        Ok(Registry { models, first })
    }

    pub(crate) fn models(&self) -> impl Iterator<Item = &Entry> {
        self.models.values()
    }

    /// Returns the model of that name, or the first one.
    pub(crate) fn model(&self, name: Option<&str>) -> Result<&Entry, Refusal> {
        self.models.get(name.unwrap_or(&self.first)).ok_or_else(|| {
            let known = self.models.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            Refusal::Unknown(format!("unknown model `{}`, expected one of {known}", name.unwrap_or_default()))
        })
    }

    /// Returns the version that answers a request.
    pub(crate) fn choose(&self, choice: Choice<'_>) -> Result<Arc<Deployment>, Refusal> {
        let entry = self.model(choice.model)?;
        // A request for a version must find it in whichever variant has it.
        let by_version =
            choice.version.filter(|_| choice.variant.is_none()).and_then(|version| entry.with_version(version));
        let variant = match by_version {
            Some(variant) => variant,
            None => entry.choose(choice.variant, choice.key)?,
        };
        let current = variant.current().ok_or_else(|| entry.not_ready(variant))?;
        match choice.version {
            Some(version) if version != current.info.version => Err(Refusal::Unknown(format!(
                "model `{}`: no version {version}, the current one is {}",
                entry.name, current.info.version
            ))),
            _ => Ok(current),
        }
    }

    /// Refuses if a variant of any model has no version yet.
    pub(crate) fn ready(&self) -> Result<(), Refusal> {
        self.models().try_for_each(Entry::ready)
    }

    /// Returns a variant of the configuration, to install a version in.
    pub(crate) fn variant(&self, model: &str, variant: &str) -> Result<&Variant, PlanError> {
        let entry = self.models.get(model).ok_or_else(|| PlanError::NoModel(model.into()))?;
        let found = entry.variants.iter().find(|known| known.name == variant);
        found.ok_or_else(|| PlanError::NoVariant { model: model.into(), variant: variant.into() })
    }

    /// Returns the current version of every variant.
    pub(crate) fn deployments(&self) -> impl Iterator<Item = Arc<Deployment>> {
        self.models().flat_map(|entry| &entry.variants).filter_map(Variant::current)
    }
}

impl Entry {
    /// Returns the first variant whose current version is this one.
    fn with_version(&self, version: u64) -> Option<&Variant> {
        self.variants.iter().find(|variant| variant.current().is_some_and(|current| current.info.version == version))
    }

    fn new(plan: &ModelPlan) -> Result<Entry, PlanError> {
        let wrong = |what: String| Err(PlanError::Variants { model: plan.name.clone(), what });
        let variants = &plan.variants;
        if let Some(variant) = variants.iter().find(|variant| !variant.weight.is_finite() || variant.weight < 0.0) {
            return wrong(format!("`{}`: expected a weight of at least 0, got {}", variant.name, variant.weight));
        }
        let total: f64 = variants.iter().map(|variant| variant.weight).sum();
        if total <= 0.0 {
            return wrong("expected at least one with a weight above 0".into());
        }
        for (at, variant) in variants.iter().enumerate() {
            if variants.len() > 1 && variant.name.is_empty() {
                return wrong("expected a name for each variant, got an empty one".into());
            }
            if variants[..at].iter().any(|before| before.name == variant.name) {
                return wrong(format!("`{}`: given twice", variant.name));
            }
        }
        let mut end = 0.0;
        let variants = variants.iter().map(|variant| {
            end += variant.weight / total;
            Variant { name: variant.name.clone(), end, current: RwLock::default() }
        });
        let seed = xxh3_64_with_seed(plan.name.as_bytes(), 0);
        Ok(Entry { name: plan.name.clone(), variants: variants.collect(), num_keyless: AtomicU64::new(0), seed })
    }

    /// Returns the variant of that name; without a name, chooses by the key, or in turn if there is no key.
    fn choose(&self, name: Option<&str>, key: Option<&[u8]>) -> Result<&Variant, Refusal> {
        if let Some(name) = name {
            return self.variants.iter().find(|variant| variant.name == name).ok_or_else(|| {
                let known = self.variants.iter().filter(|variant| !variant.name.is_empty());
                let known = known.map(|variant| format!("`{}`", variant.name)).collect::<Vec<_>>().join(", ");
                let known =
                    if known.is_empty() { "the model has none".into() } else { format!("expected one of {known}") };
                Refusal::Unknown(format!("model `{}`: unknown variant `{name}`, {known}", self.name))
            });
        }
        if let [only] = &self.variants[..] {
            return Ok(only);
        }
        let bits = match key {
            Some(key) => xxh3_64_with_seed(key, self.seed),
            // Multiples of the golden ratio: after any number of requests each variant has had its share.
            None => self.num_keyless.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        let point = bits as f64 / 2f64.powi(64);
        // Rounding may leave the sum of the shares a little below 1; the last variant with a share takes the rest.
        let chosen = self.variants.iter().find(|variant| point < variant.end);
        Ok(chosen.unwrap_or_else(|| self.last_with_a_share()))
    }

    fn last_with_a_share(&self) -> &Variant {
        let mut last = &self.variants[0];
        let mut before = 0.0;
        for variant in &self.variants {
            if variant.end > before {
                last = variant;
            }
            before = variant.end;
        }
        last
    }

    /// Refuses if a variant has no version yet.
    pub(crate) fn ready(&self) -> Result<(), Refusal> {
        match self.variants.iter().find(|variant| variant.current().is_none()) {
            Some(variant) => Err(self.not_ready(variant)),
            None => Ok(()),
        }
    }

    fn not_ready(&self, variant: &Variant) -> Refusal {
        let variant = if variant.name.is_empty() { String::new() } else { format!(", variant `{}`", variant.name) };
        Refusal::Unavailable(format!("model `{}`{variant}: no version is ready yet", self.name))
    }
}

impl Variant {
    /// Returns the version that answers new requests, or None before the first version is warm.
    pub(crate) fn current(&self) -> Option<Arc<Deployment>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Lets `next` answer new requests and returns the previous version, which ends with its last request.
    pub(crate) fn switch(&self, next: Option<Arc<Deployment>>) -> Option<Arc<Deployment>> {
        std::mem::replace(&mut *self.current.write().unwrap_or_else(PoisonError::into_inner), next)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use elasticrec_queue::{Backlog, JobQueue};

    use super::*;
    use crate::codecs::VersionInfo;
    use crate::queue::job::Job;

    fn plan(weights: &[(&str, f64)]) -> ModelPlan {
        let variants = weights.iter().map(|&(name, weight)| VariantPlan { name: name.into(), weight }).collect();
        ModelPlan { name: "ctr".into(), variants }
    }

    fn shares(weights: &[(&str, f64)], key: impl Fn(u64) -> Option<Vec<u8>>) -> Vec<f64> {
        const NUM: u64 = 20_000;
        let entry = Entry::new(&plan(weights)).unwrap();
        let chosen: Vec<String> =
            (0..NUM).map(|i| entry.choose(None, key(i).as_deref()).unwrap().name.clone()).collect();
        let share = |name: &str| chosen.iter().filter(|chosen| *chosen == name).count() as f64 / NUM as f64;
        weights.iter().map(|(name, _)| share(name)).collect()
    }

    #[test]
    fn shares_are_the_weights_with_and_without_keys() {
        let weights = [("a", 70.0), ("none", 0.0), ("b", 20.0), ("c", 10.0)];
        for key in [|_| None, |i: u64| Some(format!("user-{i}").into_bytes())] {
            for (share, expected) in shares(&weights, key).into_iter().zip([0.7, 0.0, 0.2, 0.1]) {
                assert!((share - expected).abs() < 0.01, "{share} is not {expected}");
            }
        }
    }

    #[test]
    fn a_key_always_gets_the_same_variant_independent_of_other_models() {
        let entry = Entry::new(&plan(&[("a", 1.0), ("b", 1.0)])).unwrap();
        let other = Entry::new(&ModelPlan { name: "rank".into(), ..plan(&[("a", 1.0), ("b", 1.0)]) }).unwrap();
        let of = |entry: &Entry, key: u64| entry.choose(None, Some(&key.to_le_bytes())).unwrap().name.clone();
        let same = (0..1000).filter(|&key| of(&entry, key) == of(&other, key)).count();
        assert!((400..600).contains(&same), "{same}");
        assert!((0..1000).all(|key| of(&entry, key) == of(&entry, key)));
        assert_eq!(entry.choose(Some("b"), Some(b"x")).unwrap().name, "b");
        let unknown = entry.choose(Some("z"), None).map(|_| ()).unwrap_err();
        assert_eq!(unknown.to_string(), "model `ctr`: unknown variant `z`, expected one of `a`, `b`");
    }

    #[test]
    fn a_requested_version_is_found_in_any_variant() {
        let registry = Registry::new(&[plan(&[("a", 1.0), ("b", 1.0)])]).unwrap();
        for (variant, version) in [("a", 3), ("b", 4)] {
            let info = Arc::new(VersionInfo::new("ctr", variant, version, &["click".into()]));
            let queue = JobQueue::start(1, vec![|_: Job, _: &Backlog<'_, Job>| ()]).unwrap();
            let deployment = Deployment::new(info, Bytes::new(), queue, 1);
            registry.variant("ctr", variant).unwrap().switch(Some(Arc::new(deployment)));
        }
        let chosen = |variant, version| {
            let choice = Choice { model: Some("ctr"), variant, version, key: None };
            registry.choose(choice).map(|deployment| deployment.info.version).map_err(|refusal| refusal.to_string())
        };
        for _ in 0..4 {
            assert_eq!((chosen(None, Some(3)), chosen(None, Some(4))), (Ok(3), Ok(4)));
        }
        assert_eq!(chosen(Some("a"), Some(4)), Err("model `ctr`: no version 4, the current one is 3".into()));
        assert!(chosen(None, Some(5)).unwrap_err().starts_with("model `ctr`: no version 5, the current one is "));
    }

    #[test]
    fn invalid_plans_are_refused() {
        let message = |plans: &[ModelPlan]| Registry::new(plans).map(|_| ()).unwrap_err().to_string();
        assert_eq!(message(&[]), "models: expected at least one, got none");
        assert_eq!(message(&[plan(&[("a", 1.0)]), plan(&[("a", 1.0)])]), "model `ctr`: given twice");
        let weight = "model `ctr`: variants: `b`: expected a weight of at least 0, got -1";
        assert_eq!(message(&[plan(&[("a", 1.0), ("b", -1.0)])]), weight);
        let none = "model `ctr`: variants: expected at least one with a weight above 0";
        assert_eq!(message(&[plan(&[("a", 0.0)])]), none);
        assert_eq!(message(&[plan(&[])]), none);
        assert_eq!(message(&[plan(&[("a", 1.0), ("a", 1.0)])]), "model `ctr`: variants: `a`: given twice");
        let nameless = "model `ctr`: variants: expected a name for each variant, got an empty one";
        assert_eq!(message(&[plan(&[("a", 1.0), ("", 1.0)])]), nameless);
    }
}
