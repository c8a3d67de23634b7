//! Spanish texts for the findings of `faena doctor`. The API describes findings in English, with a code for each kind.

/// What a kind of finding means and what to do about it.
pub struct Kind {
    code: &'static str,
    pub meaning: &'static str,
    pub advice: &'static str,
}

/// Returns the kind of finding with this code.
pub fn kind(code: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.code == code)
}

const fn entry(code: &'static str, meaning: &'static str, advice: &'static str) -> Kind {
    Kind { code, meaning, advice }
}

const FIX: &str = "ejecuta «faena doctor --fix»";
const SERVE: &str = "inicia un servidor («faena serve»), que lo corrige; si ya hay uno en marcha, comprueba sus bucles en /health/ready";
const RESTORE: &str =
    "ninguna reparación automática es segura: examina las filas y, si las necesitas, recupera una copia de seguridad";
const LOOP: &str = "mira el registro del servidor; reinícialo si el bucle no se recupera";
const INPUT: &str = "corrige la causa que indica el mensaje; Faena sigue reintentando y no se pierde nada";
const FILL: &str = "inicia el servidor o espera un guardian.interval: la cola se rellena desde la base de datos";
const CERTIFICATE: &str = "sustituye los archivos de tls.certificate y tls.key; el servidor los lee sin reiniciarse";

const KINDS: &[Kind] = &[
    // Jobs
    entry("job-without-state", "trabajos sin estado, que nunca se ejecutarán", FIX),
    entry("job-with-two-states", "trabajos con más de un estado", FIX),
    entry("job-unreadable", "trabajos con opciones no válidas, que impiden asignar otros", RESTORE),
    entry("illegal-state", "filas con un estado desconocido", RESTORE),
    entry("orphaned-rows", "filas de un trabajo, webhook o worker que no existe", FIX),
    entry("counter-drift", "contadores distintos del número de filas", FIX),
    entry("claim-without-owner", "trabajos asignados a un proceso que ya no existe", SERVE),
    entry("running-without-claim", "trabajos marcados en ejecución que nadie ejecuta", FIX),
    entry("run-behind", "números de ejecución en uso que aún no se han repartido", FIX),
    entry("blocked-without-parents", "trabajos que esperan a otros cuando ya no queda ninguno", FIX),
    entry("recheck-too-late", "trabajos en espera que tardarían más de un día en comprobarse", FIX),
    entry("waiting-overdue", "trabajos con retraso", SERVE),
    entry("unique-key-held", "claves únicas que conserva un trabajo terminado", FIX),
    entry("attempts-missing", "trabajos con menos intentos registrados que reintentos", RESTORE),
    entry("log-unreadable", "registros de trabajos ilegibles", RESTORE),
    entry(
        "log-time",
        "registros que retroceden en el tiempo más de lo que pueden diferir los relojes",
        "compara los relojes de los servidores",
    ),
    entry("log-incomplete", "registros de trabajos incompletos", RESTORE),
    // Lanes and limits
    entry("wrong-lane", "trabajos en un carril equivocado", FIX),
    entry(
        "lanes-near-limit",
        "casi se ha alcanzado el número máximo de carriles (combinaciones de cola, tipo y prioridad)",
        "pon los identificadores en los datos del trabajo y no en los nombres de tipos y colas; los carriles vacíos se liberan",
    ),
    entry("lane-missing", "carriles que usan los trabajos pero que no existen", RESTORE),
    entry("rule-illegal", "ajustes no válidos de colas o límites", RESTORE),
    entry("key-missing", "trabajos listos sin la clave que exige su carril, o con una que sobra", FIX),
    entry("key-queue-missing", "claves con trabajos listos que no se pueden asignar", FIX),
    entry("key-queue-closed", "colas de claves cerradas que nunca se abrirán", FIX),
    entry("key-queue-overdue", "colas de claves que deberían haberse abierto hace tiempo", SERVE),
    entry("key-in-flight-stale", "trabajos que cuentan para el límite de una clave sin estar en curso", FIX),
    entry("key-in-flight-missing", "trabajos en curso que no cuentan para el límite de su clave", FIX),
    // Nodes and workers
    entry("node-dead", "nodos que se pararon sin liberar sus trabajos", SERVE),
    entry("worker-unwatched", "workers activos sin nodo ni plazo", FIX),
    entry("worker-overdue", "workers cuyo plazo ha pasado y que no se han dado por perdidos", SERVE),
    entry("worker-state", "workers cuyo estado contradice su final", RESTORE),
    entry("worker-history", "cambios de estado imposibles de workers", RESTORE),
    // Events, webhooks and bulk actions
    entry("outbox-without-event", "mensajes del outbox sin evento", FIX),
    entry("outbox-unknown-sink", "mensajes del outbox para un destino que no existe", FIX),
    entry("lease-unknown-sink", "reservas de un destino que no existe", FIX),
    entry("webhook-stuck", "webhooks sin enviar que no tienen hora prevista", FIX),
    entry("webhook-overdue", "webhooks con retraso", SERVE),
    entry("bulk-stuck", "acciones en bloque sin terminar que no tienen hora prevista", FIX),
    entry("bulk-overdue", "acciones en bloque con retraso", SERVE),
    // Schedules
    entry("schedule-stuck", "planificaciones activas sin próxima hora prevista", FIX),
    entry("schedule-overdue", "planificaciones con retraso", SERVE),
    entry(
        "schedule-unreadable",
        "planificaciones con horas no válidas, que no se disparan",
        "elimínalas («faena schedules delete») y créalas de nuevo",
    ),
    entry(
        "tick-without-job",
        "horas previstas cuyo trabajo ya no existe, aunque nadie ha eliminado trabajos",
        "es normal si «retention» es menor que una hora; si no, examina las filas",
    ),
    entry("due-twice", "trabajos creados para una hora prevista que ya tenía uno", RESTORE),
    // Tasks
    entry("machine-unreadable", "máquinas ilegibles, cuyas tareas no pueden continuar", RESTORE),
    entry("machine-changed", "máquinas modificadas después de registrarlas", RESTORE),
    entry(
        "task-without-machine",
        "tareas de una máquina que no está registrada",
        "registra otra vez esa versión («faena machines register»)",
    ),
    entry("task-unreadable", "tareas ilegibles, que no pueden continuar", RESTORE),
    entry("task-timers", "tareas a las que les falta o les sobra un temporizador", FIX),
    entry("task-columns", "tareas cuyas columnas difieren de su contenido", FIX),
    entry("task-inconsistent", "tareas incoherentes", RESTORE),
    entry("task-history", "tareas con el historial dañado", RESTORE),
    entry("task-overdue", "tareas con un temporizador que lleva retraso", SERVE),
    // Databases
    entry(
        "schema-old",
        "el esquema de la base de datos es antiguo",
        "ejecuta «faena migrate» o inicia un servidor de esta versión",
    ),
    entry("postgres-old", "la versión de PostgreSQL es antigua", "actualiza a PostgreSQL 13 o posterior"),
    entry(
        "clock-skew",
        "los relojes de la base de datos y de esta máquina difieren",
        "sincroniza los relojes de las dos máquinas con NTP",
    ),
    entry(
        "partition-missing",
        "días futuros sin partición para los trabajos completados",
        "inicia un servidor, que las crea, o ejecuta «faena doctor --fix»",
    ),
    entry(
        "default-partition",
        "trabajos completados fuera de las particiones por día",
        "no es grave: la retención los elimina. Si aumentan, busca «partition» en los registros de los servidores",
    ),
    entry(
        "xmin-held",
        "sesiones que impiden borrar versiones antiguas de filas, lo que frena la asignación de trabajos",
        "termina la transacción o la sesión: SELECT pg_terminate_backend(pid)",
    ),
    entry(
        "slot-held",
        "slots de replicación que retienen versiones antiguas de filas o WAL",
        "deja que el consumidor se ponga al día o elimina el slot: SELECT pg_drop_replication_slot(name)",
    ),
    entry(
        "vacuum-behind",
        "tablas con muchas filas muertas",
        "mira si aparece xmin-held; si no, ejecuta VACUUM y da más procesos a autovacuum",
    ),
    entry(
        "listen-impossible",
        "PostgreSQL no puede avisar a los servidores",
        "no es grave, porque los servidores consultan; para avisos inmediatos, conecta sin el modo de transacción de PgBouncer",
    ),
    entry(
        "file-damaged",
        "errores en el archivo de la base de datos",
        "para el servidor, copia el archivo y después recupera una copia de seguridad o prueba «sqlite3 FILE .recover»",
    ),
    entry(
        "wal-large",
        "el registro de escritura anticipada (WAL) es grande",
        "termina el lector que lleva mucho tiempo abierto o reinicia el servidor",
    ),
    entry(
        "file-read-only",
        "el archivo de la base de datos es de solo lectura",
        "da permiso de escritura en el archivo y su carpeta al usuario que ejecuta el servidor",
    ),
    entry("file-open-to-all", "cualquiera puede escribir en el archivo", "ejecuta «chmod o-w» sobre el archivo"),
    // The machine and the server
    entry("disk-space", "queda poco espacio en el disco", "libera espacio o acorta la retención"),
    entry("certificate-expired", "el certificado TLS ha caducado", CERTIFICATE),
    entry("certificate-expiring", "el certificado TLS caducará pronto", CERTIFICATE),
    entry(
        "server-database",
        "el servidor no puede usar su base de datos",
        "comprueba la base de datos y el registro del servidor",
    ),
    entry(
        "signals-lost",
        "el servidor no recibe los avisos de otros servidores",
        "pon en database.listen_url una dirección directa de PostgreSQL; mientras tanto el servidor consulta",
    ),
    entry("loop-failing", "un bucle del servidor falla", LOOP),
    entry("loop-late", "un bucle del servidor lleva retraso", LOOP),
    entry("loop-missing", "un bucle del servidor no está en marcha", LOOP),
    entry("input-down", "una entrada no está disponible", INPUT),
    entry("sink-down", "un destino no está disponible", INPUT),
    // Redis
    entry(
        "redis-unavailable",
        "Redis no está disponible",
        "inicia Redis o corrige queue.redis_url; con queue.fallback = true asigna mientras tanto la base de datos",
    ),
    entry("redis-not-filled", "la cola en Redis aún no está llena", FILL),
    entry(
        "redis-format",
        "la cola en Redis tiene el formato de otra versión",
        "usa la misma versión de faena en todos los servidores, o pon otro queue.prefix",
    ),
    entry(
        "redis-foreign-key",
        "hay claves de otro programa bajo el prefijo de la cola",
        "elimínalas o pon un queue.prefix que no use ningún otro programa",
    ),
    entry(
        "redis-rejected",
        "Redis rechaza órdenes de Faena",
        "permite al usuario de queue.redis_url las órdenes que enumera la guía",
    ),
    entry("redis-missing", "trabajos que faltan en la cola de Redis", FILL),
    entry(
        "redis-extra",
        "trabajos que están en la cola de Redis y no en la base de datos",
        "inicia el servidor o espera un guardian.interval: se eliminan; si vuelven, otro programa usa el prefijo",
    ),
    entry("redis-eviction", "Redis puede descartar entradas de la cola", "pon maxmemory-policy en noeviction"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The sources that name the codes of findings.
    const SOURCES: [&str; 6] = [
        include_str!("../../store/src/doctor/checks.rs"),
        include_str!("../../store/src/doctor/tasks.rs"),
        include_str!("../../store/src/postgres/doctor.rs"),
        include_str!("../../store/src/sqlite/doctor.rs"),
        include_str!("../../server/src/doctor.rs"),
        include_str!("../../server/src/doctor/redis.rs"),
    ];

    fn is_code(text: &&str) -> bool {
        text.contains('-')
            && text.split('-').all(|word| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase()))
    }

    #[test]
    fn every_finding_is_described_in_spanish() {
        let codes: Vec<&str> = SOURCES.iter().flat_map(|source| source.split('"').filter(is_code)).collect();
        assert!(codes.contains(&"job-without-state") && codes.contains(&"redis-eviction"));
        for code in &codes {
            assert!(kind(code).is_some(), "{code} has no Spanish description");
        }
        for kind in KINDS {
            assert!(codes.contains(&kind.code), "no check finds {}", kind.code);
        }
    }
}
