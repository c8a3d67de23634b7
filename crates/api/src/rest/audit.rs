//! `GET /audit`: the audit log.

use axum::extract::{RawQuery, State};
use faena_store::AuditFilter;
use faena_wire::AuditList;

use super::paging::{ListResponse, Paging, respond};
use crate::{
    Api,
    request::{UNKNOWN_PARAMETER, read_query},
};

/// Lists entries, newest first.
pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ListResponse<AuditList> {
    let (mut filter, mut paging) = (AuditFilter::default(), Paging::<i64>::new());
    read_query(query.as_deref(), &[], |name, value| {
        if paging.set(name, &value)? {
            return Ok(());
        }
        match name {
            "actor" => filter.actor = Some(value),
            "action" => filter.action = Some(value),
            "target" => filter.target = Some(value),
            _ => return Err(UNKNOWN_PARAMETER.into()),
        }
        Ok(())
    })?;
    let store = &api.engine.store;
    let total = store.audit_total(filter.clone()).await?;
    // Newest first: the page after the cursor has the entries before it.
    filter.before = paging.after();
    let read = store.audit_list(filter, paging.wanted()?).await?;
    let (entries, page_info) = paging.page_of_read(read, total, |entry| entry.sequence)?;
    respond(page_info, |page_info| AuditList::new(entries, page_info))
}
