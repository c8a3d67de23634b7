//! Checks every request before its route: the memory of its headers, the rate limits, the key, the origin, the type of
//! the body.
//!
//! The order matters. The rate limit of the address comes before the key, so that requests with wrong keys count too.
//! The answer of every step has the CORS headers, otherwise a page could not read why it was rejected.

mod authority;
mod budget;
mod content;
mod cors;
mod grpc_body;
mod origin;
mod rate;
mod streams;

use std::{
    net::IpAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue},
    middleware::Next,
    response::{IntoResponse, Response},
};
use faena_domain::{ApiKeyId, ErrorCode};
use tokio::sync::Semaphore;
use tonic::Status;
use tower_http::{
    CompressionLevel,
    compression::{
        CompressionLayer,
        predicate::{NotForContentType, Predicate, SizeAbove},
    },
};

pub use budget::{ByteBudget, Charge, MAX_UNREGISTERED_BYTES, ReadMeter};
pub use cors::Cors;
pub use grpc_body::HasRegistered;
pub use rate::RequestRate;
pub use streams::StreamPermit;

use crate::{
    Api, ApiError, ApiResult,
    context::{self, Caller},
};
use budget::{FREE_BYTES, FREE_HEAD_BYTES};
use rate::{Limiter, Usage};
use streams::{StreamLimits, Streams};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// A smaller response fits into one packet with its headers.
const MIN_COMPRESSED_BYTES: u16 = 1_024;

/// Maximum number of rejections that wait at the same time. Further ones are answered immediately.
const MAX_DELAYED_REJECTIONS: usize = 10_000;

/// Limits of the traffic that the server accepts.
#[derive(Clone, Default, Debug)]
pub struct TrafficConfig {
    pub per_key: Option<RequestRate>,
    pub per_address: Option<RequestRate>,
    pub cors: Cors,
    /// How long the answer to a request above a limit is delayed. A client that repeats its requests immediately would
    /// otherwise keep the processor busy with rejections.
    pub rejection_delay: Duration,
    /// Bytes that requests in flight may occupy together. `None`: any number.
    pub in_flight_bytes: Option<usize>,
    /// Open streams of events and jobs. `None`: any number.
    pub max_streams: Option<usize>,
    /// Open streams of one API key, or of one address for callers without a key. `None`: any number.
    pub max_streams_per_caller: Option<usize>,
}

/// State of the limits of this process.
pub struct Traffic {
    keys: Option<Limiter<ApiKeyId>>,
    addresses: Option<Limiter<IpAddr>>,
    cors: Cors,
    rejected: [AtomicU64; RejectReason::ALL.len()],
    rejection_delay: Duration,
    /// Limits the rejections that wait at the same time.
    delayed_rejections: Semaphore,
    budget: ByteBudget,
    streams: Streams,
}

impl Default for Traffic {
    /// Accepts everything.
    fn default() -> Traffic {
        Traffic::new(TrafficConfig::default())
    }
}

/// Why a request is rejected before its route runs, for the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RejectReason {
    KeyRate,
    AddressRate,
    Authentication,
    Origin,
    Content,
    /// The budget of bytes in flight is used up.
    Memory,
    /// The caller or the server has too many streams.
    Streams,
}

impl RejectReason {
    pub const ALL: [RejectReason; 7] = [
        RejectReason::KeyRate,
        RejectReason::AddressRate,
        RejectReason::Authentication,
        RejectReason::Origin,
        RejectReason::Content,
        RejectReason::Memory,
        RejectReason::Streams,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            RejectReason::KeyRate => "key_rate",
            RejectReason::AddressRate => "address_rate",
            RejectReason::Authentication => "authentication",
            RejectReason::Origin => "origin",
            RejectReason::Content => "content",
            RejectReason::Memory => "memory",
            RejectReason::Streams => "streams",
        }
    }
}

impl Traffic {
    pub fn new(config: TrafficConfig) -> Traffic {
        Traffic {
            keys: config.per_key.map(|rate| Limiter::new("key", rate)),
            addresses: config.per_address.map(|rate| Limiter::new("address", rate)),
            cors: config.cors,
            rejected: Default::default(),
            rejection_delay: config.rejection_delay,
            delayed_rejections: Semaphore::new(MAX_DELAYED_REJECTIONS),
            budget: ByteBudget::new(config.in_flight_bytes.unwrap_or(usize::MAX)),
            streams: Streams::new(StreamLimits {
                total: config.max_streams.unwrap_or(usize::MAX),
                per_caller: config.max_streams_per_caller.unwrap_or(usize::MAX),
            }),
        }
    }

    /// Returns the bytes that requests in flight may occupy.
    pub fn budget(&self) -> &ByteBudget {
        &self.budget
    }

    /// Admits a stream of the caller of the current request.
    pub(crate) fn admit_stream(&self) -> ApiResult<StreamPermit> {
        self.streams.admit(&context::caller()).inspect_err(|_| self.count(RejectReason::Streams))
    }

    /// Charges the budget for the head of a request with this size.
    async fn cover_head(&self, bytes: usize) -> ApiResult<Charge> {
        let mut charge = Charge::new(&self.budget);
        if bytes > FREE_HEAD_BYTES {
            let covered = charge.cover(FREE_BYTES + bytes - FREE_HEAD_BYTES).await;
            covered.inspect_err(|_| self.count(RejectReason::Memory))?;
        }
        Ok(charge)
    }

    /// Delays the answer to a request above a limit.
    async fn delay_rejection(&self, error: &ApiError) {
        if error.code == ErrorCode::RateLimited
            && !self.rejection_delay.is_zero()
            && let Ok(_permit) = self.delayed_rejections.try_acquire()
        {
            tokio::time::sleep(self.rejection_delay).await;
        }
    }

    /// Returns the number of requests that were rejected for a reason.
    pub fn rejected(&self, reason: RejectReason) -> u64 {
        self.rejected[reason as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self, reason: RejectReason) {
        self.rejected[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of an address.
    fn check_address(&self, address: Option<IpAddr>) -> Option<Usage> {
        Some(self.addresses.as_ref()?.check(client_network(address?)))
    }

    /// Counts a wrong key that did not come in the header of a request. Fails if its address is above its rate limit.
    pub fn record_wrong_key(&self, address: Option<IpAddr>) -> ApiResult<()> {
        self.count(RejectReason::Authentication);
        self.check_address(address).map_or(Ok(()), |usage| self.require_within_limit(usage, RejectReason::AddressRate))
    }

    /// Fails with 429 and counts the rejection if `usage` exceeds its limit.
    fn require_within_limit(&self, usage: Usage, reason: RejectReason) -> ApiResult<()> {
        let Some(seconds) = usage.retry_after_seconds() else { return Ok(()) };
        self.count(reason);
        let message = format!("too many requests from this {}; try again in {seconds} s", usage.name);
        Err(ApiError { retry_after_seconds: Some(seconds), ..ApiError::new(ErrorCode::RateLimited, message) })
    }
}

/// Returns the address or network that counts as one client: an IPv4 address, or the /64 network of an IPv6 client.
fn client_network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
    }
}

fn head_bytes(request: &Request) -> usize {
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
    let uri = request.uri();
    headers.sum::<usize>() + uri.path().len() + uri.query().map_or(0, str::len)
}

/// Checks a request, and runs its route if it is accepted.
pub async fn admit(State(api): State<Api>, request: Request, next: Next) -> Response {
    let origin = request.headers().get(axum::http::header::ORIGIN).cloned();
    let mut usages = Vec::new();
    let mut response = match api.traffic.cors.preflight(&request) {
        Some(answer) => answer,
        None => {
            let is_grpc = content::is_grpc(&request);
            let head = api.traffic.cover_head(head_bytes(&request)).await;
            match head.and_then(|charge| Ok((charge, check(&api, request, &mut usages)?))) {
                Ok((_charge, request)) if is_grpc => {
                    let (request, _messages) = grpc_body::limit(request, &api.traffic.budget);
                    next.run(request).await
                }
                Ok((_charge, request)) => next.run(request).await,
                Err(error) => {
                    api.traffic.delay_rejection(&error).await;
                    if is_grpc {
                        Status::from(error).into_http::<Body>().into_response()
                    } else {
                        error.into_response()
                    }
                }
            }
        }
    };
    add_usages(&usages, response.headers_mut());
    api.traffic.cors.decorate(origin.as_ref(), response.headers_mut());
    response
}

/// Returns the request that the route gets, or why it is rejected.
fn check(api: &Api, request: Request, usages: &mut Vec<Usage>) -> ApiResult<Request> {
    let traffic = &api.traffic;
    let has_wrong_key = context::has_wrong_key();
    let rejected = |reason: RejectReason| {
        move |error: ApiError| {
            traffic.count(reason);
            error
        }
    };
    if has_wrong_key || !is_exempt(request.uri().path()) {
        limit(traffic, &context::caller(), usages)?;
    }
    if has_wrong_key {
        context::access().map_err(ApiError::from).map_err(rejected(RejectReason::Authentication))?;
    }
    origin::check(api, &request).map_err(rejected(RejectReason::Origin))?;
    content::accept(request, api.parser().limits.max_batch_bytes).map_err(rejected(RejectReason::Content))
}

/// Returns whether a path has no rate limit. Health checks and metrics must be readable while a limit is reached.
fn is_exempt(path: &str) -> bool {
    path == "/health" || path.starts_with("/health/") || path == "/metrics" || path.starts_with("/grpc.health.v1.")
}

/// Counts a request by address and key. Processes that this server has started are not counted.
fn limit(traffic: &Traffic, caller: &Caller, usages: &mut Vec<Usage>) -> ApiResult<()> {
    let access = caller.access.as_ref().ok();
    if access.is_some_and(|access| access.is_own_worker()) {
        return Ok(());
    }
    if let Some(usage) = traffic.check_address(caller.address) {
        usages.push(usage);
        traffic.require_within_limit(usage, RejectReason::AddressRate)?;
    }
    if let (Some(keys), Some(key)) = (&traffic.keys, access.and_then(|access| access.key())) {
        let usage = keys.check(key);
        usages.push(usage);
        traffic.require_within_limit(usage, RejectReason::KeyRate)?;
    }
    Ok(())
}

fn add_usages(usages: &[Usage], headers: &mut HeaderMap) {
    if usages.is_empty() {
        return;
    }
    let join = |item: fn(&Usage) -> String| usages.iter().map(item).collect::<Vec<_>>().join(", ");
    for (name, text) in [(RATE_LIMIT_POLICY, join(Usage::policy)), (RATE_LIMIT, join(Usage::state))] {
        headers.insert(name, HeaderValue::from_str(&text).expect("names and numbers"));
    }
}

/// Compresses responses for callers that accept gzip. A stream of events is not compressed, because each event must
/// arrive immediately, and gRPC has its own compression.
pub fn compression() -> CompressionLayer<impl Predicate> {
    let predicate = SizeAbove::new(MIN_COMPRESSED_BYTES).and(NotForContentType::SSE).and(NotForContentType::GRPC);
    CompressionLayer::new().quality(CompressionLevel::Fastest).compress_when(predicate)
}
