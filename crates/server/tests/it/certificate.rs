//! A TLS certificate that expires soon is reported.

use std::path::Path;

use rcgen::{CertificateParams, KeyPair, date_time_ymd};

use crate::{
    faena::{Faena, run},
    shell::output_parts,
};

const TLS: [(&str, &str); 2] = [("FAENA_TLS_CERTIFICATE", "certificate.pem"), ("FAENA_TLS_KEY", "key.pem")];

/// Writes a certificate that expires at the start of the day in `days` days, and returns that time in seconds since 1970.
pub fn write_certificate(folder: &Path, days: i64) -> i64 {
    let day = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date() + jiff::Span::new().days(days);
    let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    params.not_after = date_time_ymd(day.year().into(), day.month().unsigned_abs(), day.day().unsigned_abs());
    let key = KeyPair::generate().unwrap();
    std::fs::write(folder.join("certificate.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(folder.join("key.pem"), key.serialize_pem()).unwrap();
    day.to_zoned(jiff::tz::TimeZone::UTC).unwrap().timestamp().as_second()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_expires_soon_is_reported_by_the_doctor_and_the_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let expires_at = write_certificate(folder.path(), 5);
    let health = [("FAENA_HEALTH_MODE", "always"), ("FAENA_HEALTH_PORT", "0")];
    let mut faena = Faena::spawn(folder.path(), &[TLS, health].concat());
    let url = faena.announced("health").await;
    let metrics = faena.http.get(format!("{url}/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains(&format!("faena_tls_certificate_expiry_timestamp_seconds {expires_at}\n")), "{metrics}");
    // The certificate is not for the name in the address. The health check accepts it.
    let port = faena.announced("url").await.rsplit_once(':').unwrap().1.to_owned();
    let (code, stdout, stderr) = output_parts(&run(folder.path(), &[TLS[0], TLS[1], ("PORT", &port)], &["health"]));
    assert_eq!((code, stdout.as_str()), (0, "healthy\n"), "{stderr}");

    let doctor = || output_parts(&run(folder.path(), &TLS, &["doctor"]));
    let (code, stdout, _) = doctor();
    assert!(code == 0 && stdout.contains("warning  certificate-expiring") && stdout.contains(" days at "), "{stdout}");
    write_certificate(folder.path(), -1);
    let (code, stdout, _) = doctor();
    assert!(code == 1 && stdout.contains("error    certificate-expired"), "{stdout}");
    write_certificate(folder.path(), 90);
    let (code, stdout, _) = doctor();
    assert!(code == 0 && !stdout.contains("certificate"), "{stdout}");
}
